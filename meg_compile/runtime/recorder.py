"""Runs a constructor on the meta device and writes down, on a tape, what it does to its tensors.

Two modes are needed. `Recorder` sees every operator below Python: it moves factories to the meta device and records.
`LooksLikeCpu` sees every call from Python: there the tensors claim to be on the CPU, so that a constructor takes the
branches that it would take in a plain build.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from meg_compile.runtime.tape import START, CannotRecord, Op, Ref, restore_generator, run, schedule, window

_ATEN = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
_OVERWRITES = {  # operators that leave nothing of their first argument
    *(_ATEN.normal_, _ATEN.uniform_, _ATEN.random_, _ATEN.exponential_, _ATEN.log_normal_, _ATEN.cauchy_),
    *(_ATEN.geometric_, _ATEN.bernoulli_, _ATEN.fill_, _ATEN.zero_, _ATEN.copy_),
}
_BEYOND_OPERATORS = {
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.type, Tensor.apply_, Tensor.map_, Tensor.map2_),
    *(Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.resize_, Tensor.resize_as_, Tensor.set_),
}
_ON_CPU = {
    getattr(Tensor, name).__get__: answer for name, answer in {"device": _CPU, "is_meta": False, "is_cpu": True}.items()
}


class Recorder(TorchDispatchMode):
    """Records operators. `reason` says why the recording is no good, None while it is.

    While it records, the state of the global generator is a mark: it differs after every draw, so a state that the
    constructor puts back says after which draw it was taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.nbytes: list[int] = []  # per storage
        self.marks: set[int] = set()  # draws that the constructor goes back to
        self.start = torch.get_rng_state()
        self.drawn = False  # whether the constructor saw values that depend on the generator
        self.reason: str | None = None
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no address is used twice
        self._foreign: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> a tensor from outside, what stood in it
        self._states: dict[bytes, int] = {}
        self._latest = START
        self._mark(START)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            try:
                return self._operator(func, args, dict(kwargs or {}))
            except Exception as problem:
                self.refuse(problem)
                raise

    def refuse(self, problem: Exception) -> None:
        self.reason = self.reason or (str(problem) if isinstance(problem, CannotRecord) else repr(problem))

    def ref(self, tensor: Tensor) -> Ref:
        """Where a tensor of the recording lies. Any other tensor is a CannotRecord."""
        number = self._numbers.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None
        if number is None:
            raise CannotRecord("a tensor is not made by torch's operators")
        return Ref(number, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def content(self, ref: Ref) -> tuple[Tensor, bool]:
        """What a recorded tensor holds at this point, and whether it depends on the generator."""
        plan = schedule(self.ops, {ref.storage}, all_draws=False)
        with _disable_current_modes(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.start)
            _, content = next(run(self.ops, self.nbytes, plan, self.marks))
            return window(content, ref), plan.draws

    def look(self, tensor: Tensor) -> Tensor:
        """The content of a tensor, for the constructor."""
        content, draws = self.content(self.ref(tensor))
        self.drawn |= draws
        return content

    def finish(self) -> None:
        """After the constructor: what it did last to the generator, and behind our back to tensors from outside."""
        self._follow_generator()
        if not all(torch.equal(_as_bytes(now), _as_bytes(then)) for now, then in self._foreign.values()):
            raise CannotRecord("a tensor from outside is changed")

    def _follow_generator(self) -> None:
        """Record that the constructor has seeded the generator, or put an earlier state back, since the last draw."""
        state = torch.get_rng_state()
        mark = self._states.get(_digest(state))
        if mark == self._latest:
            return
        if mark is not None:
            self.marks.add(mark)
            self._append(Op(restore_generator, (mark,), draws=True))
        elif torch.equal(state, torch.Generator().manual_seed(torch.initial_seed()).get_state()):
            self._append(Op(torch.manual_seed, (torch.initial_seed(),), draws=True))
        else:
            raise CannotRecord("the state of the random number generator is set to one from elsewhere")

    def _operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        packet, arguments = func.overloadpacket, func._schema.arguments
        if packet is _ATEN.lift_fresh:  # what torch.tensor makes is its own; from_numpy shares memory, as a blob shows
            return self._adopt(args[0], fresh=args[0].untyped_storage().resizable())
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self._follow_generator()
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(kwargs)):
            raise CannotRecord("a random number generator of its own is used")

        kwargs.pop("pin_memory", None)
        args, kwargs = tree_map_only(Tensor, self._adopt, (args, kwargs))
        on_meta, on_cpu = _devices(arguments, args, kwargs)
        reads, writes, covered = self._touched(packet, arguments, args, kwargs)
        refs, kwrefs = tree_map_only(Tensor, self.ref, (args, on_cpu))
        try:
            result = func(*args, **on_meta)
        except Exception:
            if writes or draws:
                raise
            return self._with_values(func, args, on_cpu)
        if any(self._storages[s].nbytes() != self.nbytes[s] for s in writes):
            raise CannotRecord("a tensor is resized")

        made = tuple(self._number(tensor) for tensor in _tensors(result))
        new = frozenset(ref.storage for ref in made if ref)
        if new or writes or draws:  # else it is a view
            op = Op(func, refs, kwrefs, made, reads, writes | new, covered | new, draws, torch.get_default_dtype())
            self._append(op)
        return result

    def _touched(
        self, packet: Any, arguments: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """The storages that an operator reads, those that it changes, and those of these of which it leaves nothing."""
        names = [argument.name for argument in arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        changed = [given.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
        overwritten = {x.name for x in arguments if x.is_out} | ({names[0]} if packet in _OVERWRITES else set())
        by_shape_only = packet.__name__.startswith("new_") or packet.__name__.endswith("_like")
        used = [] if by_shape_only else [value for name, value in given.items() if name not in overwritten]

        def storages(tree: Any) -> frozenset[int]:
            return frozenset(self.ref(tensor).storage for tensor in _tensors(tree))

        reads, writes = storages(used), storages(changed)
        if not writes.isdisjoint(self._foreign):
            raise CannotRecord("a tensor from outside is changed")
        targets = _tensors([given.get(name) for name in overwritten])
        covered = storages([x for x in targets if x.nbytes == self.nbytes[self.ref(x).storage]])
        return reads, writes, covered - reads

    def _with_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that has no answer on the meta device on real values; what it makes is a constant."""
        args, kwargs = tree_map_only(Tensor, self.look, (args, kwargs))
        return tree_map_only(Tensor, self._adopt, func(*args, **kwargs))

    def _adopt(self, tensor: Tensor, fresh: bool = False) -> Tensor:
        """The meta tensor that stands for a tensor: its own if recorded, a constant's if it comes from outside.

        fresh: nobody else holds the tensor, so the constructor may change it.
        """
        if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            raise CannotRecord(f"a {type(tensor).__name__} that is not a plain dense tensor is used")
        if tensor.is_conj() or tensor.is_neg():
            raise CannotRecord("a lazily conjugated tensor is used")
        if tensor.is_meta:
            return tensor
        if tensor.device != _CPU:
            raise CannotRecord(f"a tensor is on {tensor.device}")
        constant = tensor.detach().clone()
        twin = torch.empty_strided(constant.size(), constant.stride(), dtype=constant.dtype, device=_META)
        made = self._number(twin)
        assert made is not None
        if not fresh:
            self._foreign[made.storage] = tensor, constant
        only = frozenset([made.storage])
        self._append(Op(torch.clone, (constant,), {}, (made,), writes=only, fresh=only))
        return twin

    def _number(self, tensor: Tensor) -> Ref | None:
        """Number the storage of a new tensor; None where it is known."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        self.nbytes.append(storage.nbytes())
        return self.ref(tensor)

    def _append(self, op: Op) -> None:
        self.ops.append(op)
        if op.draws:
            self._mark(len(self.ops) - 1)

    def _mark(self, draw: int) -> None:
        """Move the generator to a state that stands for: after this draw."""
        torch.rand(())
        self._latest = draw
        self._states[_digest(torch.get_rng_state())] = draw


class LooksLikeCpu(TorchFunctionMode):
    """Lets the tensors of a recording look like real ones to Python."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorded = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        try:
            if not recorded:
                return func(*args, **kwargs)
            if func in _ON_CPU:
                return _ON_CPU[func]
            if func in _BEYOND_OPERATORS:
                raise CannotRecord(f"Tensor.{func.__name__} reaches past torch's operators")
            if func is Tensor.tolist:
                return self.recorder.look(args[0]).tolist()
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.to:
                args, kwargs = tree_map(_cpu_to_meta, (args, kwargs))
            return func(*args, **kwargs)
        except Exception as problem:
            self.recorder.refuse(problem)
            raise


def _cpu_to_meta(leaf: Any) -> Any:
    is_device = isinstance(leaf, str | torch.device)
    return _META if is_device and torch.device(leaf).type == "cpu" else leaf


def _devices(arguments: Any, args: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments for the recording, on the meta device, and for the replay, on the CPU."""
    device = kwargs.get("device")
    makes = any(argument.name == "device" for argument in arguments) and not _tensors([args, kwargs])
    if device is None and not makes:
        return kwargs, kwargs
    if device is not None and device.type not in ("cpu", "meta"):
        raise CannotRecord(f"a tensor is made on {device}")
    return kwargs | {"device": _META}, kwargs | {"device": _CPU}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _digest(state: Tensor) -> bytes:
    return blake2b(bytes(state.numpy()), digest_size=16).digest()
