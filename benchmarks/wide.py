"""Float64 throughout: what a model asks for in float32 whatever its own dtype, it gets in float64.

Most models of transformers compute norms, rotary angles, softmaxes and the loss in float32. Even in float64, two right
runs of such a model then differ by 1e-7, and so would some wrong ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class Wide(TorchFunctionMode):
    """While it is active float32 means float64, in eager modules and in what is captured."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map_only(torch.dtype, _wide, (args, kwargs or {}))
        if func is torch._grouped_mm:
            return _grouped_mm(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped_mm(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """x [S, k] in groups that end at `offs` [E], times weights [E, k, n]; torch has none in float64."""
    groups = x.tensor_split(offs[:-1].long())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else dtype


def widened(model: nn.Module) -> nn.Module:
    """The model, its forward now wide; its starting weights and buffers are made as ever."""
    forward = model.forward

    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return forward(*args, **kwargs)

    model.forward = wide
    return model
