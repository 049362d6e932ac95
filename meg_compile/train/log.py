"""What a run shows and writes while it trains; rank 0 only."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "loss_scale", "skipped")


class RunLog:
    """A context that takes one record a step: to `metrics.jsonl`, to TensorBoard and to the console.

    On a terminal the console has one progress bar, elsewhere one line a step. A record holds `step` (from 1), `loss`,
    `grad_norm` (None for a skipped step), `lr`, `tokens`, `step_s`, `tokens_per_s`, in fp16 `loss_scale` and how many
    steps were `skipped` so far, and whatever else is to be kept in `metrics.jsonl`.

    done, earlier: the steps that a run goes on from, and the `metrics.jsonl` that has them. `metrics.jsonl` starts with
    those lines, so that it is the curve of one run.
    """

    def __init__(
        self, run_dir: Path, steps: int, console: Console | None = None, done: int = 0, earlier: Path | None = None
    ):
        self.run_dir, self.steps, self.done = run_dir, steps, done
        self.console = console or Console()
        self.earlier = lines_until(earlier, done) if earlier else []

    def __enter__(self) -> "RunLog":
        self.metrics = (self.run_dir / "metrics.jsonl").open("w")
        self.metrics.writelines(self.earlier)
        self.metrics.flush()
        self.tensorboard = SummaryWriter(
            str(self.run_dir / "tensorboard"), purge_step=self.done + 1 if self.done else None
        )
        self.progress = None
        if self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self.progress = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self.bar = self.progress.add_task("", total=self.steps, completed=self.done)
            self.progress.start()
        return self

    def step(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self.metrics, flush=True)
        for name in SCALARS:
            if record.get(name) is not None:
                self.tensorboard.add_scalar(name, record[name], record["step"])
        if self.progress:
            self.progress.update(self.bar, completed=record["step"], description=_figures(record))
        else:
            print(f"step {record['step']}/{self.steps}  {_figures(record)}", file=self.console.file, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.progress:
            self.progress.stop()
        self.metrics.close()
        self.tensorboard.close()


def lines_until(path: Path, step: int) -> list[str]:
    """The lines of a `metrics.jsonl` up to a step; none where there is no such file."""
    if not path.is_file():
        return []
    found: dict[int, str] = {}
    for line in path.read_text().splitlines(keepends=True):
        try:
            found[json.loads(line)["step"]] = line
        except (ValueError, KeyError, TypeError):  # one that was cut short
            break
    return [line for number, line in found.items() if number <= step]


def _figures(record: dict[str, Any]) -> str:
    norm = "overflow, skipped" if record["grad_norm"] is None else f"{record['grad_norm']:.4f}"
    scale = f"  loss_scale {record['loss_scale']:g}  skipped {record['skipped']}" if "loss_scale" in record else ""
    return (
        f"loss {record['loss']:.4f}  grad_norm {norm}  lr {record['lr']:.1e}  "
        f"tokens/s {record['tokens_per_s']:,.0f}{scale}"
    )
