"""One table of all jobs of a sweep, on screen and as `sweep.csv` and `sweep.json`."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SIZES = ("tp", "pp", "vpp", "dp", "cp")
STYLES = {"ok": "green", "refused": "yellow", "failed": "red", "stopped": "yellow"}


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    overrides  what the command line set for it
    varied     those of them that differ between the jobs
    plan       the composed plan section, as far as there is one
    result     what its `result.json` holds
    """

    overrides: Sequence[str]
    varied: Sequence[str]
    run_dir: Path
    plan: Mapping[str, Any]
    result: Mapping[str, Any]

    def row(self) -> dict[str, Any]:
        """The figures of the table; None for what the job did not get to."""
        memory = self.result.get("peak_memory_bytes_per_rank")
        sizes = [f"{name}={self.plan[name]}" for name in SIZES if self.plan.get(name, 1) != 1]
        return {
            "job": self.run_dir.name,
            "overrides": " ".join(self.overrides),
            "plan": " ".join(sizes) or "single",
            "tokens_per_s": self.result.get("tokens_per_s"),
            "peak_memory_bytes": max(memory) if memory else None,
            "loss": self.result.get("loss_last"),
            "status": self.result["status"],
            "error": self.result.get("error"),
        }


def report(jobs: Sequence[Job], sweep_dir: Path, console: Console | None = None) -> None:
    """Writes `sweep.csv` and `sweep.json` into the sweep's directory and prints the table."""
    rows = [job.row() for job in jobs]
    (sweep_dir / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    with (sweep_dir / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    console = console or Console()
    console.print(f"{len(rows)} jobs in {sweep_dir}", soft_wrap=True, highlight=False)
    table = Table()
    for column in ("job", "overrides", "plan"):
        table.add_column(column)
    for column in ("tokens/s", "peak MiB a rank", "loss"):
        table.add_column(column, justify="right")
    table.add_column("status")
    for job, row in zip(jobs, rows, strict=True):
        figures = (
            _number(row["tokens_per_s"], ",.0f"),
            _mebibytes(row["peak_memory_bytes"]),
            _number(row["loss"], ".4f"),
        )
        table.add_row(row["job"], " ".join(job.varied), row["plan"], *figures, _status(row))
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _mebibytes(num_bytes: int | None) -> str:
    return _number(None if num_bytes is None else num_bytes / 2**20, ",.0f")


def _status(row: Mapping[str, Any]) -> str:
    style = STYLES.get(row["status"], "")
    return f"[{style}]{row['status']}[/{style}]" if style else row["status"]
