"""Custom autograd Functions keep their own backward: each call is a node of the graph, which applies the Function.

`torch.export` would trace into the call and lose the backward. So while a model is captured, an operator made for the
purpose stands in for it. What a Function does to axes is found by running it on meta tensors, forward and backward: if
all of that is entry by entry, it is known as such; otherwise it has no rule, until the user writes one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meg_compile.errors import CaptureError, Fault
from meg_compile.graph.nodes import source_line

_LIBRARY = torch.library.Library("meg_compile_functions", "FRAGMENT")
_STAND_INS: dict[tuple[Any, ...], Any] = {}
_APPLIED: dict[Any, Callable[..., Any]] = {}
"""What each stand-in stands for."""

_PLUMBING = {"detach", "alias", "ones_like", "zeros_like", "empty_like", "empty", "zeros", "ones"}
_GRADIENTS = {"tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward"}
ENTRY_BY_ENTRY = {
    *_PLUMBING,
    *_GRADIENTS,
    *"""add sub rsub mul div true_divide pow neg abs sign sgn exp log log1p expm1 sqrt rsqrt reciprocal square sin cos
    tanh sigmoid erf relu gelu silu elu leaky_relu hardtanh softplus clamp clamp_min clamp_max minimum maximum where
    masked_fill eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not round floor
    ceil lerp addcmul addcdiv _to_copy to clone copy""".split(),
}


def stand_in(cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """What cls.apply(*args) gives, by an operator that stands in for it in the graph."""
    at = tuple(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor))
    literals = tuple(None if i in at else arg for i, arg in enumerate(args))
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(literals)):
        raise _refusal(cls.__name__, "takes tensors in a list, which a graph would freeze")
    key = cls, at, repr(literals)
    if key not in _STAND_INS:
        _STAND_INS[key] = _make(cls, at, literals)
    call = _STAND_INS[key]
    results = call(*(args[i] for i in at))
    return results[0] if _APPLIED[call].gives_one else tuple(results)  # type: ignore[attr-defined]


def _make(cls: type[torch.autograd.Function], at: tuple[int, ...], literals: tuple[Any, ...]) -> Any:
    def filled(tensors: tuple[torch.Tensor, ...]) -> list[Any]:
        args = list(literals)
        for i, tensor in zip(at, tensors, strict=True):
            args[i] = tensor
        return args

    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        context: Any = FunctionCtx()
        context.needs_input_grad = tuple(i in at for i in range(len(literals)))
        given = () if _is_new_style(cls) else (context,)
        with torch.no_grad():
            out = cls.forward(*given, *filled(tensors))
        if not all(isinstance(one, torch.Tensor) for one in tree_leaves(out)):
            raise _refusal(cls.__name__, "gives something else than tensors")
        apply.gives_one = isinstance(out, torch.Tensor)  # type: ignore[attr-defined]
        return [out] if isinstance(out, torch.Tensor) else list(out)

    def apply(*tensors: torch.Tensor) -> Any:
        return cls.apply(*filled(tensors))

    name = f"{cls.__name__}_{len(_STAND_INS)}"
    _LIBRARY.define(f"{name}({', '.join(f'Tensor x{i}' for i in at)}) -> Tensor[]")
    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meg_compile_functions::{name}", forward, lib=_LIBRARY)
    made = getattr(torch.ops.meg_compile_functions, name).default
    apply.__name__ = apply.__qualname__ = cls.__name__
    apply.__module__ = cls.__module__
    apply.namespace = cls.__module__.rpartition(".")[2]  # type: ignore[attr-defined]
    _APPLIED[made] = apply
    return made


def _is_new_style(cls: type[torch.autograd.Function]) -> bool:
    return cls.setup_context is not torch.autograd.Function.setup_context


def apply_functions(graph: fx.Graph) -> None:
    """Put the Functions in place of what stood in for them. CaptureError for one that no graph can keep."""
    for node in list(graph.nodes):
        if node.target not in _APPLIED:
            continue
        apply = node.target = _APPLIED[node.target]
        apply.is_entry_by_entry = _is_entry_by_entry(node, apply)  # type: ignore[attr-defined]
        if len(node.meta["val"]) == 1:
            node.meta["val"] = node.meta["val"][0]
            for item in list(node.users):
                assert item.target is operator.getitem
                item.replace_all_uses_with(node)
                graph.erase_node(item)


class _Calls(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.draws, self.written = False, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.written.add(args[0].untyped_storage()._cdata)
        out, name = func(*args, **(kwargs or {})), func._opname.rstrip("_")
        if name not in ("view", "expand") or out.shape != args[0].shape:
            self.names.add(name)
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return out


def _is_entry_by_entry(node: fx.Node, apply: Callable[..., Any]) -> bool:
    leaves = []
    for given in (n.meta["val"] for n in node.args if isinstance(n, fx.Node)):
        like = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        leaves.append(like.requires_grad_(like.is_floating_point()))
    inputs, calls, knows = [leaf.clone() for leaf in leaves], _Calls(), True
    try:
        with torch.enable_grad(), calls:
            found = apply(*inputs)
            results = [found] if isinstance(found, torch.Tensor) else list(found)
            if outs := [out for out in results if out.requires_grad]:
                grads = [torch.empty_like(out) for out in outs]
                torch.autograd.grad(outs, [x for x in inputs if x.requires_grad], grads, allow_unused=True)
    except Exception:  # it looks at numbers, which meta tensors lack
        knows = False
    if calls.draws:
        raise _refusal(apply.__name__, "draws random numbers, which no plan can be made to share", node)
    if calls.written & {x.untyped_storage()._cdata for x in inputs}:
        raise _refusal(apply.__name__, "writes to what it was given", node)
    return knows and calls.names <= ENTRY_BY_ENTRY


def _refusal(name: str, what: str, node: fx.Node | None = None) -> CaptureError:
    fix = "write it with differentiable operators, or torch.library.custom_op"
    place = source_line(node) if node is not None else ""
    return CaptureError(Fault(place or "forward", None, f"the autograd.Function {name} {what}", fix))
