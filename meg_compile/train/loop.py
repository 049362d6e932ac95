"""Training a compiled program: the loop that every rank runs."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from meg_compile.runtime.replicas import Replicas
from meg_compile.train.export import export
from meg_compile.train.log import RunLog, tracker
from meg_compile.train.meter import Meter
from meg_compile.train.step import Trainer
from meg_compile.train.summary import show, summarize


def train(config: Any, program: Any, executor: Any, groups: Any, dataset: Any, run_dir: Path) -> dict[str, Any]:
    """Train for `config.train.steps` steps and write the weights where the configuration asks for them.

    Rank 0 writes `metrics.jsonl` and TensorBoard's events under `run_dir` and prints; every rank returns the figures
    for `result.json`. MegError where the ranks of a replica read different rows, the loss is no number
    or copies of a parameter part.
    """
    trainer = Trainer(config, program, executor, groups, dataset)
    is_first = groups.rank == 0
    meter = Meter(config, program, executor.device, trainer.timers)
    replicas, check_every = Replicas(executor), config.train.check_replicas
    records: list[dict[str, Any]] = []
    started = time.perf_counter()
    with RunLog(run_dir, config.train.steps, wandb=tracker(config, run_dir)) if is_first else nullcontext() as log:
        for step in range(config.train.steps):
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
            records[-1] |= meter.step(step, step_s)
            if scaled:
                records[-1] |= scaled | {"skipped": trainer.num_skipped}
            if log:
                log.step(records[-1])
            if check_every and (step + 1) % check_every == 0:
                replicas.check(step + 1)
    train_s = time.perf_counter() - started
    if config.export.path is not None:
        export(program.params, executor.gather("value"), Path(config.export.path) if is_first else None)
    result = summarize(config, program, executor, records, train_s, meter)
    if is_first:
        show(result, program.plan)
    return result
