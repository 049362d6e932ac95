"""A tape of the operators that built a model, and the order in which a rank replays them.

A tensor on the tape is a window (`Ref`) on a numbered storage, so views need no operators of their own. Whatever
overwrites a whole storage begins a new *life* of it; operators are linked by the lives that they read and change.
Replaying keeps these promises:

- every random draw runs, in the order of the recording, so the generator always stands where it stood: a draw that
  nobody here wants goes to a scratch tensor;
- any other operator runs only where a wanted value needs it, and as soon as the last draw behind that value is done,
  so a finished tensor can leave before the next one is drawn;
- a life ends, and its memory goes, with its last operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Life: TypeAlias = tuple[int, int]  # a storage, and the operator that began this life of it
START = -1  # stands before the first operator


class CannotRecord(Exception):
    """The constructor does something that no tape can repeat; the text says what."""


@dataclass(frozen=True)
class Ref:
    """A tensor as a window on a storage; offset and strides count elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """From its first element to its last."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.dtype.itemsize * (last + 1) if 0 not in self.size else 0


@dataclass(frozen=True)
class Op:
    """One recorded operator; a Ref stands for each tensor in its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[Ref | None, ...] = ()  # per tensor that it returns: the new storage, None where it is an argument's
    reads: frozenset[int] = frozenset()  # storages whose content it uses
    writes: frozenset[int] = frozenset()  # storages that it changes or makes
    fresh: frozenset[int] = frozenset()  # those of `writes` of which it leaves nothing, so a new life begins
    draws: bool = False  # uses or sets the random number generator
    default_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Schedule:
    """What to run, in order, and what becomes of it."""

    order: list[int]
    needed: set[int]  # the others of `order` are draws that only move the generator
    lives: list[dict[int, Life]]  # per operator: the life of each storage that it touches
    ends: dict[int, list[Life]]  # per operator: the lives whose last operator it is
    final: dict[int, Life]  # per wanted storage: the life that the recording left it in
    draws: bool  # whether wanted values depend on the generator


def schedule(ops: Sequence[Op], wanted: Collection[int], all_draws: bool) -> Schedule:
    """The replay that computes the wanted storages. all_draws: leave the generator as the recording would."""
    lives: list[dict[int, Life]] = []
    now: dict[int, Life] = {}
    for index, op in enumerate(ops):
        lives.append({s: (s, index) if s in op.fresh else now[s] for s in op.reads | op.writes})
        now.update(lives[-1])
    final = {storage: now[storage] for storage in wanted}

    needed = _needed(ops, lives, final.values(), all_draws)
    draws = any(ops[index].draws for index in needed)
    if draws and not all_draws:
        return schedule(ops, wanted, all_draws=True)
    running = needed | {index for index, op in enumerate(ops) if op.draws and all_draws}

    reads = {index: [lives[index][s] for s in ops[index].reads] for index in running}
    writes = {index: [lives[index][s] for s in ops[index].writes] if index in needed else [] for index in running}
    order = _order(ops, sorted(running), reads, writes, final.values())
    last = {life: index for index in order for life in reads[index] + writes[index]}
    ends = defaultdict(list)
    for life, index in last.items():
        ends[index].append(life)
    return Schedule(order, needed, lives, ends, final, draws)


def _needed(ops: Sequence[Op], lives: list[dict[int, Life]], wanted: Collection[Life], all_draws: bool) -> set[int]:
    """The operators whose results reach a wanted life or, where all draws run, a draw."""
    needed, live = set(), set(wanted)
    for index in reversed(range(len(ops))):
        op, life = ops[index], lives[index]
        drawn = op.draws and all_draws
        if any(life[s] in live for s in op.writes) or (drawn and op.reads & op.writes):
            needed.add(index)
            live.update(life.values())
        elif drawn:
            live.update(life[s] for s in op.reads)
    return needed


def _order(
    ops: Sequence[Op],
    running: list[int],
    reads: dict[int, list[Life]],
    writes: dict[int, list[Life]],
    wanted: Collection[Life],
) -> list[int]:
    """Draws as they were recorded; after each the wanted lives that waited for it alone; the rest when asked for."""
    before: dict[int, list[int]] = {}  # per operator: those that must have run
    drawn: dict[int, int] = {}  # per operator: the last draw that it waits for
    writer: dict[Life, int] = {}
    readers: dict[Life, list[int]] = defaultdict(list)  # since the last write
    for index in running:
        before[index] = [writer[life] for life in reads[index] + writes[index] if life in writer]
        for life in writes[index]:
            before[index] += readers.pop(life, [])
            writer[life] = index
        for life in reads[index]:
            readers[life].append(index)
        drawn[index] = index if ops[index].draws else max((drawn[other] for other in before[index]), default=START)

    milestones = {index for index in running if ops[index].draws} | {writer[life] for life in wanted}
    order: dict[int, None] = {}
    for milestone in sorted(milestones, key=lambda index: (drawn[index], index)):
        batch, stack = set(), [milestone]
        while stack:
            index = stack.pop()
            if index not in order and index not in batch:
                batch.add(index)
                stack += before[index]
        order |= dict.fromkeys(sorted(batch))
    return list(order)


def run(
    ops: Sequence[Op], nbytes: Sequence[int], plan: Schedule, marks: Collection[int]
) -> Iterator[tuple[int, Tensor]]:
    """Run a schedule on the CPU with the global generator.

    Yields (storage, a tensor on it) once the content is final; it may be overwritten as soon as the next is asked for.
    nbytes: the size of each storage. marks: draws after which the generator is saved, since a later operator goes back
    there.
    """
    held: dict[Life, Tensor] = {}
    spare = _Spare()
    states = {START: torch.get_rng_state()}
    for index in plan.order:
        op = ops[index]
        if op.func is restore_generator:
            torch.set_rng_state(states[op.args[0]])
        else:
            _run_op(op, plan.lives[index], held, nbytes, spare, keep=index in plan.needed)
        if index in marks:
            states[index] = torch.get_rng_state()
        for life in plan.ends.get(index, ()):
            if plan.final.get(life[0]) == life:
                yield life[0], held[life]
            spare.give(held.pop(life))


def restore_generator(mark: int) -> None:
    """Stands on a tape where the constructor put back the generator state that it had after the draw `mark`."""
    raise AssertionError(f"only `run` can go back to {mark}")


def window(content: Tensor, ref: Ref) -> Tensor:
    """The tensor that `ref` describes, on the storage of `content`."""
    return torch.empty(0, dtype=ref.dtype).set_(content.untyped_storage(), ref.offset, ref.size, ref.stride)


def _run_op(
    op: Op, life: dict[int, Life], held: dict[Life, Tensor], nbytes: Sequence[int], spare: _Spare, keep: bool
) -> None:
    """Run one operator on the held lives; keep: hold what it makes, else it only moves the generator."""
    if keep:
        made = {ref.storage for ref in op.outs if ref}
        held.update((life[s], spare.take(nbytes[s])) for s in op.fresh - made)
    scratch = []

    def tensor(ref: Ref) -> Tensor:
        if ref.storage in op.reads or (keep and ref.storage in op.writes):
            return window(held[life[ref.storage]], ref)
        scratch.append(spare.take(ref.num_bytes))
        return window(scratch[-1], replace(ref, offset=0))

    outside = torch.get_default_dtype()
    torch.set_default_dtype(op.default_dtype)
    try:
        with torch.no_grad():
            args, kwargs = tree_map_only(Ref, tensor, (op.args, op.kwargs))
            results = op.func(*args, **kwargs)
    finally:
        torch.set_default_dtype(outside)
    for block in scratch:
        spare.give(block)
    if keep:
        for ref, result in zip(op.outs, (x for x in tree_leaves(results) if isinstance(x, Tensor)), strict=True):
            if ref:
                _check_layout(result, ref, nbytes[ref.storage], op)
                held[life[ref.storage]] = result


class _Spare:
    """The largest block of memory that is free, kept for the next who needs about as much.

    Without it the heap falls to pieces: each shard would be put into the hole that its whole parameter leaves, and the
    next parameter would no longer fit there.
    """

    def __init__(self) -> None:
        self.block: Tensor | None = None

    def take(self, num_bytes: int) -> Tensor:
        block = self.block
        if block is None or not num_bytes <= block.nbytes <= 16 * num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        self.block = None
        return block

    def give(self, content: Tensor) -> None:
        num_bytes = content.untyped_storage().nbytes()
        if self.block is None or num_bytes > self.block.nbytes:
            self.block = window(content, Ref(-1, torch.uint8, (num_bytes,), (1,), 0))


def _check_layout(result: Tensor, ref: Ref, num_bytes: int, op: Op) -> None:
    """What comes after was recorded for the layout that the meta device foresaw."""
    layout = (result.dtype, tuple(result.shape), result.stride(), result.storage_offset())
    if layout != (ref.dtype, ref.size, ref.stride, ref.offset) or result.untyped_storage().nbytes() != num_bytes:
        raise CannotRecord(f"{op.func} lays its result out otherwise on the CPU than on the meta device")
