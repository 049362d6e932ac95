"""Dropout off, whatever the model: two programs that draw different random masks cannot be compared."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

DROPOUTS = {
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
}


class DropoutOff(TorchFunctionMode):
    """While it is active, dropout gives back its input and attention drops nothing.

    It works on eager modules and while a model is captured. `num_switched_off` counts the calls that would have
    dropped something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_switched_off = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.num_switched_off += bool(p and training)
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            p = kwargs.pop("dropout_p", args[4] if len(args) > 4 else 0.0)
            self.num_switched_off += bool(p)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)
