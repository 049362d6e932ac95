"""Does forward do the same each time that it is called? A rehearsal on fake tensors, before a model is captured.

A graph does in every step what forward did while it was captured. So forward is run twice without data, and what is
done to the batch must be the same. Constants that the first run leaves to the second are a cache, unless a third run
finds that the second one has changed them. What is made of constants alone is computed, so that whatever keeps it
(functools.lru_cache) keeps its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meg_compile.errors import CaptureError, Fault
from meg_compile.graph.sentinel import users_place

LARGEST = 2**24
"""Entries of a constant that is still computed."""

READABLE = 2**12
"""Entries of a constant whose values are compared."""

LIFT = torch.ops.aten.lift_fresh.default
OTHERWISE = "does something else when it is called again (a count, a first call, random numbers of its own)"
FIX = "compute from the inputs alone, or make it a buffer in __init__ that forward only reads"


def rehearse(step: nn.Module, examples: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> None:
    """CaptureError, naming the line, where forward reads what an earlier call left, or does something else.

    step: with its parameters on meta or replaced by fake ones of `mode`, as are the examples. What fails here for
    another reason is left to the capture to say.
    """
    run = None
    with _fake_tensors(step, mode):
        marks = _Marks([*examples, *step.parameters()])
        for number in (1, 2, 3):
            run, numbers = _Run(number, marks, run), _numbers(step)
            try:
                with mode, run:
                    step(*examples)
            except CaptureError:
                raise
            except Exception:
                return run.raise_refused()
            run.raise_refused()
            if number > 1:
                _refuse_counts(step, numbers)
            if number == 2 and not run.has_read_constants:
                return


class _Marks:
    """In which run a tensor was made, and whether it moves: depends on the batch, on parameters or on random numbers.

    A fake tensor carries its mark, a real one shares that of its storage.
    """

    def __init__(self, moved: list[torch.Tensor]):
        self.moved = {id(t) for t in moved}
        self.of_storage: dict[int, tuple[int, bool]] = {}
        self.alive: list[torch.Tensor] = []

    def get(self, tensor: torch.Tensor) -> tuple[int, bool] | None:
        """None for a tensor that was there before."""
        if id(tensor) in self.moved:
            return 0, True
        if isinstance(tensor, FakeTensor):
            return getattr(tensor, "_rehearsed", None)
        return None if tensor.is_meta else self.of_storage.get(tensor.untyped_storage()._cdata)

    def moves(self, tensor: torch.Tensor) -> bool:
        return (self.get(tensor) or (0, False))[1]

    def put(self, tensor: torch.Tensor, run: int, moves: bool) -> None:
        if isinstance(tensor, FakeTensor):
            tensor._rehearsed = run, moves  # type: ignore[attr-defined]
        elif not tensor.is_meta:
            self.of_storage[tensor.untyped_storage()._cdata] = run, moves
            self.alive.append(tensor)  # else another storage could have its address


class _Run(TorchDispatchMode):
    """One run: what it does to values that move, operator by operator, and a mark on every tensor that is made."""

    def __init__(self, number: int, marks: _Marks, before: _Run | None):
        super().__init__()
        self.number, self.marks, self.before = number, marks, before
        self.calls: list[tuple[Any, ...]] = []
        self.has_read_constants = False
        self.refused: CaptureError | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        for tensor in tensors:
            self.check_kept(tensor)
        moves = torch.Tag.nondeterministic_seeded in func.tags or any(map(self.marks.moves, tensors))
        if moves and func.namespace != "prim":
            self.compare((func, *map(_spell, leaves)))
        known = set() if func is LIFT else set(map(id, tensors))
        if func._schema.is_mutable:
            self.write(func, args, kwargs, moves)
        out = func(*args, **kwargs) if moves else self.compute(func, tensors, args, kwargs)
        aliases = func._schema.is_mutable or (func.is_view and func is not LIFT)
        for tensor in tree_leaves(out):
            is_new = isinstance(tensor, torch.Tensor) and id(tensor) not in known
            if is_new and (not aliases or isinstance(tensor, FakeTensor)):
                self.marks.put(tensor, self.number, moves)
        return out

    def compute(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """What is made of constants alone, as a real tensor where it is not too large."""
        if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            return func(*args, **kwargs)
        if not tensors:
            out = func(*args, **kwargs)
            if sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)) > LARGEST:
                return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def write(self, func: Any, args: Any, kwargs: Any, moves: bool) -> None:
        """A real tensor that this run made may be written to; from then on it moves where what is written does."""
        for at, argument in enumerate(func._schema.arguments):
            tensor = args[at] if at < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written or not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
                continue
            if self.marks.get(tensor) is None and not tensor.is_meta:
                self.refuse("writes to a tensor that is no buffer, and is kept between calls")
            self.marks.put(tensor, self.number, moves or self.marks.moves(tensor))

    def compare(self, call: tuple[Any, ...]) -> None:
        at = len(self.calls)
        if self.before is not None and (at >= len(self.before.calls) or self.before.calls[at] != call):
            self.refuse(OTHERWISE)
        self.calls.append(call)

    def check_kept(self, tensor: torch.Tensor) -> None:
        made, moves = self.marks.get(tensor) or (self.number, False)
        if 0 < made < self.number and moves:
            self.refuse("reads a tensor that an earlier call left")
        elif 1 < made < self.number:
            self.refuse("reads a number that changes with every call")
        self.has_read_constants |= 0 < made < self.number

    def refuse(self, problem: str) -> None:
        """Not at once: torch's own code around an operator need not survive an error in it."""
        self.refused = self.refused or _refusal(problem)

    def raise_refused(self) -> None:
        if self.refused is not None:
            raise self.refused
        if self.before is not None and len(self.before.calls) > len(self.calls):
            raise _refusal(OTHERWISE, "forward")


def _spell(leaf: Any) -> str:
    """A literal, or the values of a constant that is not too large."""
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    if isinstance(leaf, FakeTensor) or leaf.is_meta or leaf.numel() > READABLE:
        return ""
    with unset_fake_temporarily():
        return repr(leaf.tolist())


def _refusal(problem: str, place: str | None = None) -> CaptureError:
    return CaptureError(
        Fault(place or users_place(True) or "forward", None, f"{problem}, which a graph would freeze", FIX)
    )


def _numbers(step: nn.Module) -> dict[str, Any]:
    """The plain numbers that modules hold as attributes."""
    return {
        f"{path}.{name}".removeprefix("model."): value
        for path, module in step.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float) and not name.startswith("__")
    }


def _refuse_counts(step: nn.Module, before: dict[str, Any]) -> None:
    for name, value in _numbers(step).items():
        if name in before and before[name] != value:
            raise _refusal(f"changes {name} from {before[name]} to {value} in every call", "forward")


@contextmanager
def _fake_tensors(step: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Real parameters and buffers replaced by fake ones."""
    before: list[tuple[Any, str, torch.Tensor]] = []
    for module in step.modules():
        holders: tuple[Any, Any] = (module._parameters, module._buffers)
        for held in holders:
            for name, tensor in held.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    before.append((held, name, tensor))
                    held[name] = mode.from_tensor(tensor)
    try:
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor
