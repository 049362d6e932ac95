"""The figures of a run: for `result.json`, and as a table to read."""

from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from meg_compile.plan import Plan
from meg_compile.train.meter import Meter, memory_bytes


def summarize(
    config: Any, program: Any, executor: Any, records: list[dict[str, Any]], train_s: float, meter: Meter
) -> dict[str, Any]:
    """The run's figures, the same on every rank (all of which must call this).

    tokens_per_s: over all steps but the first, which warms up, where there are more; tflops_per_rank and mfu alike.
    phase_s: of the last steps, the smallest and largest seconds a step of all ranks.
    """
    num_local = sum(executor.tensors[name].numel() for name, spec in executor.specs.items() if not spec.buffer)
    per_rank = _gather([num_local, memory_bytes(executor.device)[1]], executor.device)
    steady = records[1:] or records
    train = config.train
    return {
        "task": "train",
        "status": "ok",
        "plan": config.to_dict()["plan"],
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "precision": config.precision,
        "steps": len(records),
        "skipped_steps": records[-1].get("skipped", 0) if records else 0,
        "loss_first": records[0]["loss"] if records else None,
        "loss_last": records[-1]["loss"] if records else None,
        "valid_loss_last": next((r["valid_loss"] for r in reversed(records) if "valid_loss" in r), None),
        "tokens": sum(record["tokens"] for record in records),
        "tokens_per_s": sum(r["tokens"] for r in steady) / sum(r["step_s"] for r in steady) if steady else None,
        "flops_per_step": meter.flops_per_row * train.global_batch_size,
        **(meter.rates(sum(r["step_s"] for r in steady), sum(r["num_rows"] for r in steady)) if steady else {}),
        "phase_s": meter.phase_s,
        "num_parameters": sum(spec.numel for spec in program.params.values() if not spec.buffer),
        "num_parameters_per_rank": [parameters for parameters, _ in per_rank],
        "peak_memory_bytes_per_rank": [peak for _, peak in per_rank],
        "train_s": train_s,
        "export": config.export.path,
    }


def show(result: dict[str, Any], plan: Plan, console: Console | None = None) -> None:
    table = Table(title="Training", show_header=False, title_justify="left")
    table.add_row("plan", str(plan))
    table.add_row("batch", f"{result['global_batch_size']} rows a step, {result['micro_batch_size']} a micro-batch")
    table.add_row("parameters", f"{result['num_parameters']:,}")
    table.add_row("  per rank", _range(result["num_parameters_per_rank"], "{:,}"))
    if result["steps"]:
        table.add_row("loss", f"{result['loss_first']:.4f} -> {result['loss_last']:.4f} in {result['steps']} steps")
        if result["valid_loss_last"] is not None:
            table.add_row("validation loss", f"{result['valid_loss_last']:.4f} after the last step")
        if result["skipped_steps"]:
            table.add_row("", f"{result['skipped_steps']} of them skipped: gradients overflowed")
        table.add_row("tokens/s", f"{result['tokens_per_s']:,.0f}")
        mfu = f", {result['mfu']:.1%} of what one could do" if "mfu" in result else ""
        table.add_row("TFLOP/s per rank", f"{result['tflops_per_rank']:.3g}{mfu}")
    else:
        table.add_row("loss", "no steps")
    table.add_row(
        "peak memory per rank",
        _range([b / 2**20 for b in result["peak_memory_bytes_per_rank"]], "{:,.0f}") + " MiB",
    )
    table.add_row("time", f"{result['train_s']:.1f} s")
    if result["checkpoint"]:
        table.add_row("checkpoint", result["checkpoint"])
    if result["export"]:
        table.add_row("weights", result["export"])
    (console or Console()).print(table)


def _gather(numbers: list[int], device: torch.device) -> list[list[int]]:
    mine = torch.tensor(numbers, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine.tolist()]
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [one.tolist() for one in every]


def _range(values: list, form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
