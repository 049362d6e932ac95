"""What a run shows and writes while it trains; rank 0 only."""

import importlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

SCALARS = ("loss", "grad_norm", "lr", "tokens_per_s", "tflops_per_rank", "mfu", "loss_scale", "skipped")
SCALARS += ("batch_size", "valid_loss")
RANGES = ("memory_bytes", "peak_memory_bytes")


class RunLog:
    """A context that takes one record a step: to `metrics.jsonl`, to TensorBoard and to the console.

    On a terminal the console has one progress bar, elsewhere one line a step. A record holds `step` (from 1), `loss`,
    `grad_norm` (None for a skipped step), `lr`, `tokens`, `step_s`, `tokens_per_s`, in fp16 `loss_scale` and how many
    steps were `skipped` so far, `batch_size` where it grows, `valid_loss` after some steps, what `Meter` measures, and
    whatever else is to be kept in `metrics.jsonl`.

    done, earlier: the steps that a run goes on from, and the `metrics.jsonl` that has them. `metrics.jsonl` starts with
    those lines, so that it is the curve of one run.
    wandb: a run of Weights & Biases that gets the same numbers as TensorBoard.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        console: Console | None = None,
        done: int = 0,
        earlier: Path | None = None,
        wandb: Any = None,
    ):
        self.run_dir, self.steps, self.done, self.wandb = run_dir, steps, done, wandb
        self.console = console or Console()
        self.earlier = lines_until(earlier, done) if earlier else []

    def __enter__(self) -> "RunLog":
        path = self.run_dir / "metrics.jsonl"
        part = path.with_suffix(".part")  # what is there may be the only copy of the steps before
        part.write_text("".join(self.earlier))
        part.replace(path)
        self.metrics = path.open("a")
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
        numbers = _scalars(record)
        for name, value in numbers.items():
            self.tensorboard.add_scalar(name, value, record["step"])
        if self.wandb:
            self.wandb.log(numbers, step=record["step"])
        if self.progress:
            self.progress.update(self.bar, completed=record["step"], description=_figures(record))
        else:
            print(f"step {record['step']}/{self.steps}  {_figures(record)}", file=self.console.file, flush=True)

    def __exit__(self, *error: object) -> None:
        if self.progress:
            self.progress.stop()
        self.metrics.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(error[0] is not None))


def tracker(config: Any, run_dir: Path) -> Any:
    """A run of Weights & Biases in the project `log.wandb`; None without one."""
    if config.log.wandb is None:
        return None
    wandb = importlib.import_module("wandb")
    return wandb.init(project=config.log.wandb, name=run_dir.name, dir=str(run_dir), config=config.to_dict())


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers; of those that differ between ranks the largest."""
    found = {name: record[name] for name in SCALARS if record.get(name) is not None}
    found |= {name: record[name][1] for name in RANGES if name in record}
    return found | {f"{phase}_s": most for phase, (_, most) in record.get("phase_s", {}).items()}


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
    rate = f"  TFLOP/s {record['tflops_per_rank']:.3g}" if "tflops_per_rank" in record else ""
    rate += f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    valid = f"  valid_loss {record['valid_loss']:.4f}" if "valid_loss" in record else ""
    return (
        f"loss {record['loss']:.4f}  grad_norm {norm}  lr {record['lr']:.1e}  "
        f"tokens/s {record['tokens_per_s']:,.0f}{rate}{scale}{valid}"
    )
