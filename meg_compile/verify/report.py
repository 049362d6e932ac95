"""What a comparison found."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

WORST = 10


@dataclass(frozen=True)
class Difference:
    """How far a compiled number or tensor is from the plain one.

    what: loss, norm, gradient, weight, or start (a weight before the first step). error: relative, inf where the two
    cannot be compared.
    """

    step: int
    what: str
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for nan

    @property
    def severity(self) -> tuple[bool, float]:
        """For sorting: failures first, then by error."""
        return not self.ok, math.inf if math.isnan(self.error) else self.error


@dataclass
class Report:
    """All that was compared. `differences` is filled on rank 0 only; `ok` is the same on every rank."""

    title: str
    tolerance: float
    ok: bool = True
    differences: list[Difference] = field(default_factory=list)

    def worst(self, num: int = WORST) -> list[Difference]:
        return sorted(self.differences, key=lambda difference: difference.severity, reverse=True)[:num]

    def to_dict(self) -> dict[str, Any]:
        """The figures for `result.json`: the largest error of each kind, and the worst offenders by name."""
        largest: dict[str, float] = {}
        for difference in self.differences:
            largest[difference.what] = max(largest.get(difference.what, 0.0), difference.error)
        return {
            "status": "ok" if self.ok else "failed",
            "tolerance": self.tolerance,
            "num_compared": len(self.differences),
            "largest_error": largest,
            "worst": [asdict(difference) for difference in self.worst()],
        }

    def show(self, console: Console | None = None) -> None:
        verdict = "equal" if self.ok else "NOT EQUAL"
        console = console or Console()
        console.print(f"{self.title}: {verdict}", soft_wrap=True, highlight=False)
        table = Table()
        for column in ("step", "what", "name"):
            table.add_column(column)
        for column in ("relative error", "allowed"):
            table.add_column(column, justify="right")
        for difference in self.worst():
            style = None if difference.ok else "bold red"
            figures = (f"{difference.error:.1e}", f"{difference.tolerance:.0e}")
            table.add_row(str(difference.step), difference.what, difference.name, *figures, style=style)
        table.caption = f"the {len(self.worst())} largest of {len(self.differences)} differences"
        console.print(table)
