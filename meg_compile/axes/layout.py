"""What follows from a choice of sharded axes: local sizes, and which entries of a tensor belong to a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from meg_compile.axes.atoms import Atom, Dim, Dims, atoms, branches, leaves, size_of

Run = tuple[int, int]
"""(start, length) of consecutive entries."""


@dataclass(frozen=True)
class Layout:
    """Leaf atoms that are sharded over tp ranks. One that tp does not divide is padded at its end."""

    tp: int
    sharded: frozenset[Atom]

    def touches(self, shapes: Iterable[Dims]) -> bool:
        return any(self.holds(dim) for dims in shapes for dim in dims)

    def holds(self, dim: Dim) -> bool:
        """Whether a dim is sharded."""
        return any(atom in self.sharded for atom in atoms(dim))

    def local(self, dim: Dim) -> int:
        """Entries of a dim on each rank, padding included."""
        size = 1
        for atom in leaves(dim):
            if atom.segments is not None:
                size *= sum(self.local(segment) for segment in atom.segments)
            else:
                size *= -(-atom.size // self.tp) if atom in self.sharded else atom.size
        return size

    def even(self, dim: Dim) -> bool:
        """Whether every entry of a dim lies on a shard, or none does."""
        held = {self._held(branch) for branch in branches(dim)}
        return len(held) == 1

    def _held(self, branch: list[Atom]) -> bool:
        return any(atom in self.sharded for atom in branch)

    def runs(self, dim: Dim, tp_rank: int) -> list[Run]:
        """Where a rank's entries lie in the whole dim, in order, as the fewest runs."""
        runs: list[Run] = [(0, 1)]
        for atom in leaves(dim):
            runs = _within(runs, atom.size, self._atom_runs(atom, tp_rank))
        return _join(runs)

    def _atom_runs(self, atom: Atom, tp_rank: int) -> list[Run]:
        if atom.segments is None:
            if atom not in self.sharded:
                return [(0, atom.size)]
            per_rank = -(-atom.size // self.tp)
            start = min(tp_rank * per_rank, atom.size)
            return [(start, min(per_rank, atom.size - start))]
        runs, offset = [], 0
        for segment in atom.segments:
            runs += [(offset + start, length) for start, length in self.runs(segment, tp_rank)]
            offset += size_of(segment)
        return runs


@dataclass(frozen=True)
class Shard:
    """Which part of a tensor one rank holds: per sharded dim its runs, and the padded local size."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    runs: tuple[tuple[int, tuple[Run, ...]], ...]

    def slice(self, whole: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """This rank's part of a whole tensor, or its rows from `start` to `stop`, as a new tensor; padding is zero."""
        shape = list(self.local_shape)
        if shape:
            shape[0] = max((shape[0] if stop is None else stop) - start, 0)
        part = whole.new_zeros(shape)
        for mine, theirs in self._pairs(part, whole, start):
            mine.copy_(theirs)
        return part

    def place(self, part: torch.Tensor, whole: torch.Tensor, start: int = 0) -> None:
        """Write this rank's part, or its rows from `start` on, less padding, where they belong in the whole tensor."""
        for mine, theirs in self._pairs(part, whole, start):
            theirs.copy_(mine)

    def _pairs(self, part: torch.Tensor, whole: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the part's rows, which begin at `start`, beside those of the whole that have the same entries."""
        if not self.shape:
            return [(part.view(()), whole)]
        pairs = [(part, whole)]
        runs = {0: ((0, self.shape[0]),), **dict(self.runs)}
        for dim, at_whole in runs.items():
            first, last = (start, start + len(part)) if dim == 0 else (0, self.local_shape[dim])
            spans = list(_spans(at_whole, first, last))
            pairs = [(p.narrow(dim, at, n), w.narrow(dim, there, n)) for p, w in pairs for at, there, n in spans]
        return pairs


def shard(layout: Layout, dims: Dims, tp_rank: int) -> Shard:
    return Shard(
        tuple(map(size_of, dims)),
        tuple(map(layout.local, dims)),
        tuple((i, tuple(layout.runs(d, tp_rank))) for i, d in enumerate(dims) if layout.holds(d)),
    )


def _spans(runs: Iterable[Run], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(from `first` on, in the whole, length) of a rank's entries from `first` to `last`, which lie in these runs."""
    offset = 0
    for there, length in runs:
        begin, end = max(first, offset), min(last, offset + length)
        if begin < end:
            yield begin - first, there + begin - offset, end - begin
        offset += length


def _within(outer: list[Run], size: int, inner: list[Run]) -> list[Run]:
    """Runs of a product of axes: each entry of the outer runs holds one whole copy of the inner axis."""
    if inner == [(0, size)]:
        return [(start * size, length * size) for start, length in outer]
    return [
        ((start + i) * size + first, count) for start, length in outer for i in range(length) for first, count in inner
    ]


def _join(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out
