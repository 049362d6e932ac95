"""Training a compiled program: the loop that every rank runs."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from meg_compile.checkpoint.keeper import Keeper
from meg_compile.runtime.replicas import Replicas
from meg_compile.train.evaluate import Validation
from meg_compile.train.export import export_weights
from meg_compile.train.log import RunLog, tracker
from meg_compile.train.meter import Meter
from meg_compile.train.step import Trainer
from meg_compile.train.summary import show, summarize


def train(
    config: Any,
    program: Any,
    executor: Any,
    groups: Any,
    dataset: Any,
    run_dir: Path,
    validation: Validation | None = None,
) -> dict[str, Any]:
    """Train up to `config.train.steps` steps, from a checkpoint where there is one to go on from, and write the weights
    where the configuration asks for them.

    Rank 0 writes `metrics.jsonl` and TensorBoard's events under `run_dir` and prints; every rank returns the figures
    for `result.json`, with status "stopped" where a signal ended it early. MegError where the ranks of a replica read
    different rows, the loss is no number, copies of a parameter part or a checkpoint cannot be written.
    """
    trainer, is_first, steps = Trainer(config, program, executor, groups, dataset), groups.rank == 0, config.train.steps
    meter, replicas = Meter(config, program, executor.device, trainer.timers), Replicas(executor)
    keeper, records = Keeper(config, trainer, run_dir), []
    show_in = {"done": keeper.start, "earlier": keeper.earlier}
    log = RunLog(run_dir, steps, wandb=tracker(config, run_dir), **show_in) if is_first else None
    started = time.perf_counter()
    with keeper, log or nullcontext():
        for step in range(keeper.start, steps):
            record, stop = one_step(config, trainer, step)
            record |= meter.step(step, record["step_s"], trainer.batches.span(step)[1])
            if validation and validation.due(step + 1):
                record |= {"valid_loss": validation.measure()}
            records.append(record)
            if log:
                log.step(record)
            if config.train.check_replicas and (step + 1) % config.train.check_replicas == 0:
                replicas.check(step + 1)
            if keeper.after(step + 1, stop):
                break
    train_s = time.perf_counter() - started
    if config.export.path is not None and not keeper.stopped:
        export_weights(config, program, executor.gather("value"), is_first)
    result = summarize(config, program, executor, records, train_s, meter) | keeper.figures()
    if is_first:
        show(result, program.plan)
    return result


def one_step(config: Any, trainer: Trainer, step: int) -> tuple[dict[str, Any], int]:
    """(what `metrics.jsonl` says of an optimizer step, the signal by which some rank was asked to stop, or 0)."""
    started = time.perf_counter()
    scaled = {"loss_scale": trainer.scale.value} if config.precision == "fp16" else {}
    gradients = trainer.gradients(step)
    lr = trainer.update(step, gradients.norm)
    step_s = time.perf_counter() - started
    record = {
        "step": step + 1,
        "loss": gradients.loss,
        "grad_norm": gradients.norm if math.isfinite(gradients.norm) else None,
        "lr": lr,
        "tokens": gradients.tokens,
        "num_rows": trainer.batches.span(step)[1],
        "step_s": step_s,
        "tokens_per_s": gradients.tokens / step_s,
        "rows": [f"{checksum:016x}" for checksum in gradients.checksums],
    }
    if scaled:
        record |= scaled | {"skipped": trainer.num_skipped}
    if config.train.batch_ramp:
        record |= {"batch_size": trainer.batches.span(step)[1]}
    return record, gradients.stop
