"""A model that computes its own loss, to be used for its logits."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn


def without_labels(model: nn.Module) -> nn.Module:
    """The same module, whose forward takes no `labels` any more, so that the loss is one of its logits.

    The causal language models of transformers compare each position with the next label. Labels that are shifted
    already would be shifted twice.
    """
    forward = model.forward

    @functools.wraps(forward)
    def of_logits(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    signature = inspect.signature(forward)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "labels"]
    of_logits.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    model.forward = of_logits
    return model
