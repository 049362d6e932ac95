"""What is known about each pipeline schedule before anything runs, in integers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, over `pp` ranks with `vpp` stages each.

    vpp:         how many stages per rank it runs; None for any number.
    placement:   "loop": stage s lies on rank s % pp; "v": rank r holds the stages r and 2 * pp - 1 - r.
    splits:      backward runs in two parts, and the second one, for the weights, fills the bubble.
    per_rank:    it needs at least this many micro-batches per pipeline rank.
    even_rounds: micro-batches go in m // pp rounds (at least one), which they must fill evenly.
    """

    name: str
    vpp: int | None = None
    placement: Literal["loop", "v"] = "loop"
    splits: bool = False
    per_rank: int = 0
    even_rounds: bool = False

    def stages_of(self, pp_rank: int, pp: int, vpp: int) -> list[int]:
        """The stages that a pipeline rank runs, in order."""
        return [stage for stage in range(pp * vpp) if self.rank_of(stage, pp) == pp_rank]

    def rank_of(self, stage: int, pp: int) -> int:
        """The pipeline rank that runs a stage."""
        return min(stage, 2 * pp - 1 - stage) if self.placement == "v" else stage % pp

    def allows(self, num_micro_batches: int, pp: int) -> bool:
        """Whether it can run so many micro-batches."""
        rounds = max(1, num_micro_batches // pp)
        return num_micro_batches >= max(1, self.per_rank * pp) and not (self.even_rounds and num_micro_batches % rounds)

    def why_not(self, num_micro_batches: int, pp: int) -> str:
        """What it asks of the number of micro-batches, where it does not allow this one."""
        if num_micro_batches < self.per_rank * pp:
            each = f" x {self.per_rank}" if self.per_rank > 1 else ""
            return f"needs at least {self.per_rank * pp} micro-batches for pp={pp}{each}; there are {num_micro_batches}"
        return f"{num_micro_batches} micro-batches do not fill {num_micro_batches // pp} rounds of pp={pp} evenly"

    def near(self, num_micro_batches: int, pp: int) -> list[int]:
        """The closest numbers of micro-batches that it allows, below (if there is one) and above."""
        below = (n for n in range(num_micro_batches, 0, -1) if self.allows(n, pp))
        above = (n for n in itertools.count(num_micro_batches) if self.allows(n, pp))
        return [*itertools.islice(below, 1), next(above)]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", vpp=1, per_rank=1),
        Schedule("gpipe", vpp=1),
        Schedule("interleaved_1f1b", even_rounds=True),
        Schedule("looped_bfs"),
        Schedule("interleaved_zero_bubble", splits=True, even_rounds=True),
        Schedule("zbv_zero_bubble", vpp=2, placement="v", splits=True),
        Schedule("dualpipev", vpp=2, placement="v", splits=True, per_rank=2),
    )
}
