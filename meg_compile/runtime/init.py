"""Starting weights: each rank gets its shards of exactly the weights that the plain model would start with.

`record` runs the user's constructor without allocating anything: tensors are made on the meta device, and every
operator that touches them is written on a tape. `Tape.replay` runs the tape again for real, one parameter at a time,
and keeps of each what `wanted` cuts out of it. The weights are bit-equal to those of a plain build from the same
generator state (with the same number of CPU threads, where matrix factorisations are involved), and the memory needed
is that of the shards and of about one whole parameter.

Where the constructor needs a value (`.item()`, `if x > 0`, `.tolist()`, `nonzero`), what leads to it is computed for
real. A constructor that reaches past torch's operators (NumPy views, raw storages, generators of its own) is run and
not recorded: every rank then builds the whole model, and `whole` says why.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meg_compile.runtime.recorder import LooksLikeCpu, Recorder
from meg_compile.runtime.tape import CannotRecord, Ref, run, schedule, window

Cut: TypeAlias = Callable[[Tensor], Tensor]  # a whole tensor -> this rank's shard of it
Wanted: TypeAlias = Callable[[str], Cut | None]  # a name -> how to cut it, None where this rank holds none of it
Factory: TypeAlias = Callable[[], nn.Module]
Rebuild: TypeAlias = "Callable[[int | None], Whole]"  # a seed -> the model, built for real

_GENERATOR = threading.RLock()  # torch's global generator serves one recording or replay at a time


class Tape:
    """The recorded build of a model."""

    whole: str | None = None

    def __init__(self, recorder: Recorder, module: nn.Module, rebuild: Rebuild):
        self._recorder, self._rebuild, self._module = recorder, rebuild, module
        self._refs = {name: recorder.ref(tensor) for name, tensor in _named(module)}

    def replay(self, wanted: Wanted, seed: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, shard) of every parameter and buffer that is wanted, in the order in which they are finished.

        wanted: asked once for each name, and for each of the names of a tied weight; the shards own their memory.
        seed: build as if `torch.manual_seed(seed)` came first; None: from the generator state that `record` found.
        Afterwards the global generator stands where the plain build would leave it.
        """
        tape, done = self._recorder, set()
        cuts: dict[int, list[tuple[str, Ref, Cut]]] = {}
        for name, ref in self._refs.items():
            if cut := wanted(name):
                cuts.setdefault(ref.storage, []).append((name, ref, cut))
        if seed is not None and tape.drawn:
            yield from self._rebuild(seed).replay(wanted)
            return
        contents = run(tape.ops, tape.nbytes, schedule(tape.ops, cuts, all_draws=True), tape.marks)
        state = tape.start if seed is None else torch.Generator().manual_seed(seed).get_state()
        try:
            while True:
                with _GENERATOR:
                    torch.set_rng_state(state)
                    step = next(contents, None)
                    if step is None:
                        return
                    storage, content = step
                    shards = [(name, _own(cut, window(content, ref))) for name, ref, cut in cuts[storage]]
                    state = torch.get_rng_state()
                del step, content
                done.update(name for name, _ in shards)
                yield from shards
        except CannotRecord as problem:
            self.whole = str(problem)
            yield from self._rebuild(seed).replay(lambda name: None if name in done else wanted(name))

    def value(self, tensor: Tensor) -> Tensor:
        """The value of any tensor of the recorded module, such as a mask that it holds as an attribute.

        Where it depends on the generator: from the state that `record` found.
        """
        if not tensor.is_meta:
            return tensor.detach()
        named = (self._refs[name] for name, held in _named(self._module) if held is tensor)
        with _GENERATOR:
            content, _ = self._recorder.content(next(named, None) or self._recorder.ref(tensor))
            return content.to(tensor.dtype)  # the module may have been cast since


class Whole:
    """The starting weights of a module that is built for real; `whole` says why."""

    def __init__(self, module: nn.Module, reason: str, rebuild: Rebuild | None = None):
        self.module, self.whole, self._rebuild = module, reason, rebuild
        self._after = torch.get_rng_state()

    def replay(self, wanted: Wanted, seed: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """As `Tape.replay`; a module that was given ready has its weights already and heeds no seed."""
        if seed is not None and self._rebuild:
            yield from self._rebuild(seed).replay(wanted)
            return
        for name, tensor in _named(self.module):
            if cut := wanted(name):
                yield name, _own(cut, tensor.detach())
        if self._rebuild:
            torch.set_rng_state(self._after)

    def value(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


def record(factory: Factory) -> tuple[nn.Module, Tape | Whole]:
    """Build a model without its weights: (the module, on the meta device; its starting weights).

    Where the build cannot be recorded the module is real and the weights are a `Whole`. An error of the constructor is
    raised as it is. torch's global generator is left where it was.
    """
    with _GENERATOR:
        recorder, other_generators = Recorder(), _other_generators()

        def rebuild(seed: int | None) -> Whole:
            with _GENERATOR, _at(other_generators):
                torch.set_rng_state(recorder.start) if seed is None else torch.manual_seed(seed)
                return Whole(factory(), recorder.reason or "", rebuild)

        try:
            try:
                with recorder, LooksLikeCpu(recorder):
                    module = factory()
                recorder.finish()
                tape = Tape(recorder, module, rebuild)
            except Exception as problem:
                recorder.refuse(problem)
            if recorder.reason is None:
                return module, tape
            whole = rebuild(None)
            return whole.module, whole
        finally:
            torch.set_rng_state(recorder.start)


def from_module(module: nn.Module) -> Whole:
    """The starting weights of a module that the user has built."""
    return Whole(module, "the module was given ready")


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _other_generators() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators, which a constructor may use too."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()


@contextmanager
def _at(states: tuple[Any, Any]) -> Iterator[None]:
    """Put those generators into a state, and back afterwards."""
    outside = _other_generators()
    _set_other_generators(states)
    try:
        yield
    finally:
        _set_other_generators(outside)


def _set_other_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1]:
        sys.modules["numpy"].random.set_state(states[1])


def _own(cut: Cut, whole: Tensor) -> Tensor:
    """The shard, in memory of its own."""
    shard = cut(whole).detach()
    shares = shard.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return shard.clone(memory_format=torch.contiguous_format) if shares else shard
