"""The value of a node that depends on buffers and literals alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.fx.node import map_arg

from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import is_random, upstream

ValueOf = Callable[[torch.Tensor], torch.Tensor]


def find_value(captured: Captured, node: fx.Node, value_of: ValueOf) -> torch.Tensor | None:
    """What a node gives, where it depends on buffers and literals alone."""
    needed = upstream([node])
    read = (n for n in needed if n.op == "placeholder" or (n.op == "get_attr" and n.target not in captured.buffers))
    if any(read) or any(map(is_random, needed)):
        return None
    values: dict[fx.Node, torch.Tensor] = {}
    with torch.no_grad():
        for one in captured.graph.nodes:
            if one not in needed:
                continue
            if one.op == "get_attr":
                values[one] = value_of(captured.tensors[str(one.target)]).cpu()
                if values[one].is_meta:
                    return None
                continue
            args, kwargs = map_arg((one.args, one.kwargs), values.__getitem__)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            values[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]
