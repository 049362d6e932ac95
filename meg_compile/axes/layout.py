"""What follows from a choice of sharded axes: local sizes, and which entries of a tensor belong to a rank."""

from __future__ import annotations

from collections.abc import Iterable
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

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor, as a new tensor; padding is zero."""
        part = whole
        for dim, runs in self.runs:
            part = torch.cat([part.narrow(dim, start, length) for start, length in runs], dim)
        if part.shape == self.local_shape:
            return part.clone() if part is whole else part
        padded = whole.new_zeros(self.local_shape)
        padded[tuple(slice(n) for n in part.shape)] = part
        return padded

    def place(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part, less its padding, where it belongs in the whole tensor."""
        index = tuple(_index(self, dim) for dim in range(len(self.shape)))
        counts = tuple(len(i) for i in index)
        part = part[tuple(slice(n) for n in counts)]
        if counts == self.shape:
            whole.copy_(part)
        else:
            whole[torch.meshgrid(*index, indexing="ij")] = part.to(whole.dtype)


def shard(layout: Layout, dims: Dims, tp_rank: int) -> Shard:
    return Shard(
        tuple(map(size_of, dims)),
        tuple(map(layout.local, dims)),
        tuple((i, tuple(layout.runs(d, tp_rank))) for i, d in enumerate(dims) if layout.holds(d)),
    )


def _index(part: Shard, dim: int) -> torch.Tensor:
    runs = dict(part.runs).get(dim, ((0, part.shape[dim]),))
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


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
