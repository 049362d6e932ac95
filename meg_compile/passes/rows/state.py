"""What a value of a captured graph has to do with the rows of its batch.

    Const   nothing: it comes of parameters and literals alone
    Rows    it holds a part for every row, and no part has seen another row
    Total   a linear combination of sums and means over all rows of something that each row has by itself

Where the rows lie in a value is kept as pieces: a batch of 4 x T tokens flattened to [4 * T] has one in dim 0, each row
T entries long. A view may cut the batch itself into several pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import fx


class Couples(Exception):
    """An operator by which rows of a batch depend on each other, or on their place in it. str(): how."""


class Unclear(Exception):
    """An operator of which that is not known. str(): why."""


class Piece(NamedTuple):
    """`size` consecutive rows (or groups of `stride` rows) lie along `dim`, each `inner` entries after the last."""

    dim: int
    inner: int
    stride: int
    size: int


@dataclass(frozen=True)
class Const:
    """alike: dims along which all entries are the same. numbers: where it counts 0, 1, 2, ... like rows (arange)."""

    alike: frozenset[int] = frozenset()
    numbers: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Rows:
    pieces: tuple[Piece, ...]

    @property
    def dims(self) -> set[int]:
        return {piece.dim for piece in self.pieces}

    def moved(self, to: dict[int, int]) -> Rows:
        """With dim d at to[d]."""
        return Rows(tuple(sorted(piece._replace(dim=to[piece.dim]) for piece in self.pieces)))


class Part(NamedTuple):
    """One reduction over all rows. kind: "sum", "mean", or "counted" (a sum over a count that depends on the data).
    scale: the product of the numbers that it was multiplied by since."""

    node: fx.Node
    kind: str
    scale: float = 1.0


@dataclass(frozen=True)
class Total:
    """parts: what is added up. const: whether something that is not of the batch is added too."""

    parts: frozenset[Part]
    const: bool = False

    def scaled(self, by: float) -> Total:
        return Total(frozenset(part._replace(scale=part.scale * by) for part in self.parts), self.const)


@dataclass(frozen=True)
class Sorted:
    """Of every entry of some rows, in the order into which a sort has put them (dim 0). Mixtures of experts sort tokens
    by expert, so that each expert's are consecutive, and put them back afterwards.

    by: the sort. rows: where they lay. kind: "keys" that were sorted, "values" of each by itself, its "order" (where it
    was before, divided by `every`), how many keys are the same ("counts"), the way "back" to the old order.
    """

    by: fx.Node
    rows: Rows
    kind: str
    every: int = 1


State = Const | Rows | Total | Sorted


def all_alike(shape: Sequence[int]) -> Const:
    return Const(frozenset(range(len(shape))))


def is_alike(const: Const, dim: int, shape: Sequence[int]) -> bool:
    return dim < 0 or shape[dim] == 1 or dim in const.alike


def reshaped(pieces: tuple[Piece, ...], before: Sequence[int], after: Sequence[int]) -> tuple[Piece, ...] | None:
    """The pieces of a value seen in another shape; None where rows do not end where its new dims do, or in an empty
    one."""
    if prod(before) == 0:
        return None
    found: list[Piece] = []
    for piece in pieces:
        step = piece.inner * prod(before[piece.dim + 1 :])
        parts = _single(piece, step, before, after) if piece.size == 1 else _cut(piece, step, after)
        if parts is None:
            return None
        found += parts
    return _merged(sorted(found))


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces that follow one another in one dim as one."""
    found: list[Piece] = []
    for piece in pieces:  # of one dim: by inner, the minor one first
        last = found[-1] if found else None
        if last and last.dim == piece.dim and (last.inner * last.size, last.stride * last.size) == piece[1:3]:
            found[-1] = last._replace(size=last.size * piece.size)
        else:
            found.append(piece)
    return tuple(found)


def _cut(piece: Piece, step: int, shape: Sequence[int]) -> list[Piece] | None:
    found, stop = [], step * piece.size
    for dim in range(len(shape)):
        first = prod(shape[dim + 1 :])
        last = first * shape[dim]
        low, high = max(step, first), min(stop, last)
        if low < high:
            if low % first or last % high or high % low or low % step or stop % high:
                return None
            found.append(Piece(dim, low // first, piece.stride * (low // step), high // low))
    return found if prod(part.size for part in found) == piece.size else None


def _single(piece: Piece, step: int, before: Sequence[int], shape: Sequence[int]) -> list[Piece] | None:
    """A batch of one row: a dim of its own where there is one, the leftmost, else part of a longer one that is new."""
    firsts = [(dim, prod(shape[dim + 1 :])) for dim in range(len(shape))]
    own = [Piece(dim, 1, piece.stride, 1) for dim, first in firsts if shape[dim] == 1 and first == step]
    merged = [
        Piece(dim, step // first, piece.stride, 1)
        for dim, first in firsts
        if first <= step <= first * shape[dim] and step % first == 0
    ]
    known = {(prod(before[dim + 1 :]), before[dim]) for dim in range(len(before))}
    new = [part for part in merged if (prod(shape[part.dim + 1 :]), shape[part.dim]) not in known]
    return (own or new or merged)[:1] or None
