"""How an operator is written in Python: as a person would write it, where that is sure to be the same operator.

A form is taken only if on meta tensors it calls the very operators of ATen that the node calls, with the same arguments
in the same order; where none does, the node is written as torch.ops.aten names it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")

INFIX = dict(
    add="+", sub="-", mul="*", div="/", truediv="/", floordiv="//", floor_divide="//", matmul="@", mm="@", bmm="@",
    pow="**", remainder="%", mod="%", eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=",
    bitwise_and="&", bitwise_or="|", bitwise_xor="^", and_="&", or_="|", __and__="&", __or__="|",
)  # fmt: skip
PREFIX = dict(neg="-", bitwise_not="~", invert="~")
METHODS = set(
    """reshape view transpose permute split unbind chunk flatten unflatten squeeze unsqueeze expand expand_as contiguous
    clone to type_as float masked_fill softmax log_softmax mean sum amax amin max min detach repeat repeat_interleave
    tril triu gather scatter cumsum argmax argmin topk index_select narrow movedim t pow square sqrt rsqrt exp log neg
    any all clamp new_zeros new_ones new_full""".split()
)
FUNCTIONAL = set(
    """linear embedding layer_norm rms_norm group_norm gelu relu silu mish elu leaky_relu softplus hardtanh glu
    scaled_dot_product_attention dropout pad one_hot mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy_with_logits kl_div conv1d conv2d conv3d normalize""".split()
)
RENAMED = {"split_with_sizes": "split", "_to_copy": "to", "_softmax": "softmax", "_log_softmax": "log_softmax"}
SPREAD = {"reshape", "view", "expand", "permute", "repeat"}
UNSAID = ("pin_memory", "layout", "cudnn_enable", "cudnn_enabled")
REDUCTIONS = ("none", "mean", "sum")

Spell = Callable[[Any], str]


class Expressions:
    """Writes operators, and remembers what it found out about them."""

    def __init__(self) -> None:
        self.found: dict[Any, str] = {}

    def write(self, node: fx.Node, spell: Spell) -> str:
        """A call of ATen or of Python's operators as an expression; spell: how an argument is written."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return _python(node, spell)
        inputs = list(node.all_input_nodes)
        tokens = {n: f"v{i}" for i, n in enumerate(inputs)}
        key = (str(node.target), literal((node.args, node.kwargs), tokens.__getitem__), *map(_signature, inputs))
        if key not in self.found:
            self.found[key] = self._choose(node, tokens)
        return next(form for name, form in _forms(node, spell) if name == self.found[key])

    def _choose(self, node: fx.Node, tokens: dict[fx.Node, str]) -> str:
        wanted = _calls(node, tokens, None)
        for name, form in _forms(node, lambda value: literal(value, tokens.__getitem__)):
            if name == "aten" or (wanted is not None and _calls(node, tokens, form) == wanted):
                return name
        raise AssertionError("the last form is always right")


def literal(value: Any, name: Callable[[fx.Node], str]) -> str:
    """A value as Python's source; devices are that of the stage."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(literal(item, name) for item in value)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        return f"[{inside}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {literal(item, name)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        parts = ["" if part is None else literal(part, name) for part in (value.start, value.stop)]
        return ":".join(parts + ([] if value.step is None else [literal(value.step, name)]))
    if isinstance(value, torch.device):
        return "self.device"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return str(value)


def is_of_torch(target: Any) -> bool:
    return getattr(torch, getattr(target, "__name__", ""), None) is target


def _python(node: fx.Node, spell: Spell) -> str:
    """A function of Python's module `operator`, or of torch."""
    name: str = node.target.__name__  # type: ignore[union-attr]
    args = [spell(arg) for arg in node.args]
    if is_of_torch(node.target):
        return f"torch.{name}({', '.join(args)})"
    if name in INFIX and len(args) == 2:
        return _infix(name, *args)
    if name in PREFIX and len(args) == 1:
        return f"{PREFIX[name]}{args[0]}"
    assert node.target is operator.getitem, f"{node.format_node()}: no operator that is known"
    return f"{args[0]}[{args[1]}]"


def _infix(name: str, one: str, other: str) -> str:
    return f"({one}) {INFIX[name]} {other}" if one.startswith("-") else f"{one} {INFIX[name]} {other}"


def _forms(node: fx.Node, spell: Spell) -> Iterator[tuple[str, str]]:
    """(a name, the form) of every way in which an operator may be written, the nicest first; the last one is right."""
    overload: Any = node.target
    raw = str(overload._opname)
    name = RENAMED.get(raw, raw)
    positional, named = _arguments(node)
    plain = [spell(value) for value in positional]
    keywords = [f"{key}={spell(value)}" for key, value in named.items()]
    if len(plain) == 2 and not named and name in INFIX:
        yield "infix", _infix(name, *plain)
    if name == "rsub" and len(plain) == 2 and not named:
        yield "rsub", f"{plain[1]} - {plain[0]}"
    if len(plain) == 1 and not named and name in PREFIX:
        yield "prefix", f"{PREFIX[name]}{plain[0]}"
    if special := _special(name, node, spell):
        yield "special", special
    spread = [*plain[:1], *(spell(item) for item in positional[1])] if _is_list(positional, 1) else []
    spaces = [("torch", torch), ("method", torch.Tensor), ("F", F)]
    if name in METHODS:
        spaces.sort(key=lambda space: space[0] != "method")
    if name in FUNCTIONAL:
        spaces.sort(key=lambda space: space[0] != "F")
    for space, holder in spaces:
        called = name if hasattr(holder, name) else raw
        if not hasattr(holder, called) or (called.startswith("_") and not called.endswith("_")):
            continue
        for how, args in (("spread", spread), ("", plain)):
            if args and (how == "" or (name in SPREAD and space == "method")):
                if space == "method":
                    yield space + how, f"{args[0]}.{called}({', '.join([*args[1:], *keywords])})"
                else:
                    yield space + how, f"{space}.{called}({', '.join([*args, *keywords])})"
    args = [spell(arg) for arg in node.args]
    args += [f"{key}={spell(value)}" for key, value in node.kwargs.items() if key not in UNSAID]
    yield "aten", f"torch.ops.{overload.namespace}.{raw}.{overload._overloadname}({', '.join(args)})"


def _arguments(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """(positional, by name): what equals its default is left out, and what follows it is named."""
    overload: Any = node.target
    positional, named = [], {}
    for i, argument in enumerate(overload._schema.arguments):
        if i < len(node.args):
            value = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            continue
        if argument.name in UNSAID:
            continue
        default = argument.has_default_value() and _same(value, argument.default_value)
        given = not argument.has_default_value() or isinstance(value, fx.Node)
        if default:
            continue
        if given and not argument.kwarg_only and len(positional) == i:
            positional.append(value)
        else:
            named[argument.name] = value
    return positional, named


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, fx.Node) and type(one) is type(other) and one == other


def _is_list(values: list[Any], at: int) -> bool:
    return len(values) == at + 1 and isinstance(values[at], (list, tuple)) and len(values[at]) > 0


def _special(name: str, node: fx.Node, spell: Spell) -> str:
    """Operators whose public form has its arguments in another order or shape."""
    args: Any = node.args
    if name == "embedding":
        padding = f", padding_idx={args[2]}" if len(args) > 2 and args[2] not in (None, -1) else ""
        return f"F.embedding({spell(args[1])}, {spell(args[0])}{padding})"
    if name in ("cross_entropy_loss", "nll_loss_nd", "nll_loss"):
        all_args: Any = (*args, *(None, 1, -100, 0.0)[len(args) - 2 :])
        x, target, weight, reduction, ignored, smoothing = all_args
        how = [spell(x), spell(target)] + ([f"weight={spell(weight)}"] if weight is not None else [])
        how += [f"ignore_index={ignored}"] if ignored != -100 else []
        how += [f'reduction="{REDUCTIONS[reduction]}"'] if reduction != 1 else []
        how += [f"label_smoothing={smoothing}"] if smoothing else []
        return f"F.{'cross_entropy' if name == 'cross_entropy_loss' else 'nll_loss'}({', '.join(how)})"
    if name.endswith("_loss") and len(args) == 3 and args[2] in (0, 1, 2):
        return f'F.{name}({spell(args[0])}, {spell(args[1])}, reduction="{REDUCTIONS[args[2]]}")'
    if name == "slice" and all(isinstance(a, int) for a in args[1:]):
        given: Any = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start, end, step = given
        if dim < 0:
            return ""
        end = None if end == 2**63 - 1 else end
        start = None if start == 0 else start
        part = literal(slice(start, end, None if step == 1 else step), spell)
        return f"{spell(args[0])}[{', '.join([':'] * dim + [part])}]"
    if name == "select" and isinstance(args[1], int) and args[1] >= 0:
        return f"{spell(args[0])}[{', '.join([':'] * args[1] + [spell(args[2])])}]"
    if name == "index":
        index = [":" if a is None else spell(a) for a in args[1]]
        return f"{spell(args[0])}[{', '.join(index)}]"
    if name in ("einsum", "broadcast_tensors"):
        return f"torch.{name}({', '.join([*map(spell, args[:-1]), *map(spell, args[-1])])})"
    if name == "to" and [key for key, value in node.kwargs.items() if value is not None] == ["dtype"]:
        return f"{spell(args[0])}.to({spell(node.kwargs['dtype'])})"
    return ""


def _signature(node: fx.Node) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype
        return tuple(map(one, value)) if isinstance(value, (list, tuple)) else repr(value)

    return one(node.meta.get("val"))


class _Record(TorchDispatchMode):
    """What is called, on what: tensors by the order in which they appear."""

    def __init__(self, inputs: list[Any]):
        super().__init__()
        self.calls: list[Any] = []
        self.kept: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.describe(inputs)
        self.makes_new = not inputs

    def describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.numbers:
                self.numbers[id(value)] = len(self.numbers)
                self.kept.append(value)  # so that no other tensor gets its id
            return "tensor", self.numbers[id(value)], tuple(value.shape), value.dtype
        if isinstance(value, (list, tuple)):
            return [self.describe(item) for item in value]
        return type(value), str(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        said = {k: self.describe(v) for k, v in (kwargs or {}).items() if k not in UNSAID and v is not None}
        before = (str(func), self.describe(args), said)
        out = func(*args, **(kwargs or {}))
        if self.makes_new and func is torch.ops.aten.detach.default:  # as torch's factories end
            self.numbers[id(out)] = self.numbers[id(args[0])]
            self.kept.append(out)
            return out
        self.calls.append((*before, self.describe(out)))
        return out


def _calls(node: fx.Node, tokens: dict[fx.Node, str], form: str | None) -> list[Any] | None:
    """What the node, or a form of it, calls on meta tensors; None where it cannot run there."""

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        return type(value)(map(fresh, value)) if isinstance(value, (list, tuple)) else value

    inputs = {token: fresh(n.meta["val"]) for n, token in tokens.items()}
    record = _Record(list(inputs.values()))
    try:
        with torch.no_grad(), record:
            if form is None:
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: inputs[tokens[n]])
                kwargs = {k: META if isinstance(v, torch.device) else v for k, v in kwargs.items()}
                out = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                out = eval(form, {"torch": torch, "F": F, "self": SimpleNamespace(device=META)} | inputs)
    except Exception:
        return None
    return [*record.calls, record.describe(out)]
