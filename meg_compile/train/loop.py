"""Training a compiled program: the loop that every rank runs."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from meg_compile.checkpoint.keeper import Keeper
from meg_compile.train.evaluate import Validation
from meg_compile.train.export import export_weights
from meg_compile.train.log import RunLog
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
    different rows, the loss is no number or a checkpoint cannot be written.
    """
    trainer = Trainer(config, program, executor, groups, dataset)
    is_first = groups.rank == 0
    records: list[dict[str, Any]] = []
    started = time.perf_counter()
    keeper = Keeper(config, trainer, run_dir)
    run_log = RunLog(run_dir, config.train.steps, done=keeper.start, earlier=keeper.earlier) if is_first else None
    with keeper, run_log or nullcontext() as log:
        for step in range(keeper.start, config.train.steps):
            step_started = time.perf_counter()
            scaled = {"loss_scale": trainer.scale.value} if config.precision == "fp16" else {}
            gradients = trainer.gradients(step)
            lr = trainer.update(step, gradients.norm)
            step_s = time.perf_counter() - step_started
            records.append(
                {
                    "step": step + 1,
                    "loss": gradients.loss,
                    "grad_norm": gradients.norm if math.isfinite(gradients.norm) else None,
                    "lr": lr,
                    "tokens": gradients.tokens,
                    "step_s": step_s,
                    "tokens_per_s": gradients.tokens / step_s,
                    "rows": [f"{checksum:016x}" for checksum in gradients.checksums],
                }
            )
            if config.train.batch_ramp:
                records[-1] |= {"batch_size": trainer.batches.span(step)[1]}
            if validation and validation.due(step + 1):
                records[-1] |= {"valid_loss": validation.measure()}
            if scaled:
                records[-1] |= scaled | {"skipped": trainer.num_skipped}
            if log:
                log.step(records[-1])
            if keeper.after(step + 1, gradients.stop):
                break
    train_s = time.perf_counter() - started
    if config.export.path is not None and not keeper.stopped:
        export_weights(config, program, executor.gather("value"), is_first)
    result = summarize(config, program, executor, records, train_s) | keeper.figures()
    if is_first:
        show(result, program.plan)
    return result
