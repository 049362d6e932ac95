"""The mesh of ranks, as pure integers: who is in which group, which stage follows which.

Global ranks are laid out in Megatron-LM's default order tp-cp-dp-pp, tp varying fastest, and the groups are
those that its `initialize_model_parallel` creates for the same sizes, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

DIMS = ("tp", "cp", "dp", "pp")
GROUPS = (*DIMS, "dp_cp", "tp_pp", "tp_cp", "tp_dp", "tp_dp_cp", "embd", "pos_embd")


class Coords(NamedTuple):
    """Where a rank stands in each mesh dim, counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Mesh:
    """The sizes of the mesh dims. A size below 1 is a ValueError, a rank outside the mesh an IndexError."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise ValueError(f"every mesh dim needs at least one rank, not {self}")

    @property
    def sizes(self) -> Coords:
        """The size of each mesh dim, in rank order."""
        return Coords(self.tp, self.cp, self.dp, self.pp)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def coords(self, rank: int) -> Coords:
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside a mesh of {self.size} ranks")
        coords = []
        for size in self.sizes:
            rank, coord = divmod(rank, size)
            coords.append(coord)
        return Coords(*coords)

    def rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        rank = 0
        for coord, size in reversed(list(zip(Coords(tp, cp, dp, pp), self.sizes, strict=True))):
            if not 0 <= coord < size:
                raise IndexError(f"{Coords(tp, cp, dp, pp)} is outside {self}")
            rank = rank * size + coord
        return rank

    def group_of(self, name: str, rank: int) -> list[int]:
        """The group that `rank` belongs to, in ascending order of ranks.

        name: mesh dims joined by "_" (one of `GROUPS`), or "embd" for the ranks that hold the two copies of a tied
        embedding (the first and last stage), or "pos_embd" for those with position embeddings (the first stage).
        Ranks on middle stages are in no embedding group: theirs is empty.
        """
        if name not in GROUPS:
            raise KeyError(f"no group is called {name!r}; there are {', '.join(GROUPS)}")
        if name in ("embd", "pos_embd"):
            stages = self.group_of("pp", rank)
            holders = stages[:1] if name == "pos_embd" else sorted({stages[0], stages[-1]})
            return holders if rank in holders else []
        free = name.split("_")
        here = self.coords(rank)._asdict()
        ranges = [range(size) if dim in free else (here[dim],) for dim, size in zip(DIMS, self.sizes, strict=True)]
        return [self.rank(*reversed(coords)) for coords in product(*reversed(ranges))]

    def groups(self, name: str) -> list[list[int]]:
        """All groups of that name, in Megatron's creation order (ascending first rank)."""
        groups: list[list[int]] = []
        grouped: set[int] = set()
        for rank in range(self.size):
            if rank not in grouped and (group := self.group_of(name, rank)):
                groups.append(group)
                grouped.update(group)
        return groups

    def source(self, name: str, rank: int) -> int:
        """The rank that broadcasts to the group of `rank`: the group's first."""
        return self.group_of(name, rank)[0]

    def is_first_stage(self, rank: int) -> bool:
        return self.coords(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        return self.coords(rank).pp == self.pp - 1

    def next_stage(self, rank: int) -> int:
        """The rank that holds the next stage for the same micro-batches; after the last comes the first."""
        return self._shifted(rank, 1)

    def prev_stage(self, rank: int) -> int:
        """The rank that holds the stage before; before the first comes the last."""
        return self._shifted(rank, -1)

    def _shifted(self, rank: int, stages: int) -> int:
        here = self.coords(rank)
        return self.rank(*here._replace(pp=(here.pp + stages) % self.pp))
