"""Whole runs for tests: the configuration of the reference runs, and a program on its ranks as threads."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import models
import reference
import torch
import torch.distributed as dist
from threads import run_threads
from torch import nn

from meg_compile.compiler import compile
from meg_compile.config import from_dict
from meg_compile.config.schema import Config
from meg_compile.models.loss import cross_entropy
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import Groups, init_groups
from meg_compile.train.batches import DTYPES
from meg_compile.train.rows import example

CPU = torch.device("cpu")


def config(**changes: Any) -> Config:
    """The reference run: float64, SGD with lr 0.1, 5 steps of 8 rows in order. changes: train__steps=3 and the like."""
    plain: dict[str, Any] = {
        "task": changes.pop("task", "train"),
        "precision": changes.pop("precision", "fp64"),
        "compile": False,
        "dropout": changes.pop("dropout", "exact"),
        "model": {"_target_": "models.TinyGPT"},
        "loss": {"_target_": "meg_compile.models.loss.cross_entropy"},
        "plan": {
            "tp": 1,
            "pp": 1,
            "vpp": 1,
            "dp": 1,
            "cp": 1,
            "sp": False,
            "zero": 0,
            "schedule": "1f1b",
            "stages": None,
            "split": None,
            "place": {},
            "keep": [],
            "shard": [],
            "recompute": "none",
            "recompute_every": 1,
            "strict": True,
        },
        "data": {"_target_": "models.FixedRows", "shuffle": False, "fields": None},
        "optim": {"_target_": None, "name": "sgd", "lr": 0.1, "min_lr": 0.0, "warmup_steps": 0, "weight_decay": 0.0}
        | {"betas": [0.9, 0.95], "eps": 1e-8, "momentum": 0.0, "decay": "matrices", "schedule": "constant"}
        | {"warmup_fraction": None, "no_decay": [], "groups": [], "frozen": [], "decay_steps": None}
        | {"wsd_decay_steps": None, "wsd_decay": "linear"},
        "train": {"steps": 5, "micro_batch_size": 2, "global_batch_size": 8, "seed": reference.SEED, "clip_grad": 0.0}
        | {"loss_scale": None, "check": False, "check_replicas": 1, "batch_ramp": None},
        "eval": {"every": None, "batches": None, "data": None},
        "log": {"every": 2, "timers": None, "peak_tflops": None, "wandb": None},
        "verify": {"steps": 3, "tolerance": None},
        "launch": {"nproc": None, "device": "cpu", "threads": 1, "timeout": None, "max_restarts": 0},
        "init": {"path": None},
        "checkpoint": {"dir": None, "every": None, "keep": 2, "keep_every": None, "resume": "auto"}
        | {"background": True, "signal": None},
        "export": {"path": None, "dtype": "held", "max_shard_gb": 5.0},
        "generate": {"prompts": None, "file": None, "tokens": 20, "temperature": 0.0, "top_k": None, "top_p": None}
        | {"seed": 1234, "stop": None, "tokenizer": None, "rows": None},
        "explain": {"block": 0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        assert name in plain[section], key
        plain[section][name] = value
    return from_dict(plain)


def on_ranks(
    config: Config,
    work: Callable[[Any, Executor, Groups], Any],
    factory: Callable[[], nn.Module] = models.TinyGPT,
    dataset: Any = None,
    executor_class: type[Executor] = Executor,
) -> list[Any]:
    """Compile `factory` and call work(program, executor, groups) on every rank of the plan: results in rank order."""
    dataset = models.FixedRows() if dataset is None else dataset
    dtype = DTYPES[config.precision]
    inputs = example(dataset, config.train.micro_batch_size, config.data.fields, dtype)
    torch.manual_seed(config.train.seed)
    program = compile(factory, inputs, config.plan.plan(), cross_entropy, dtype, config.dropout)

    def rank_main(_: int) -> Any:
        groups = init_groups(config.plan.plan().mesh, "cpu")
        executor = executor_class(program, groups, CPU)
        executor.load()
        dist.barrier()
        return work(program, executor, groups)

    # The threads share torch's generator: reading rows must not move it while rank 0 builds a plain model.
    with patch("meg_compile.train.batches.seeded_reads", lambda: nullcontext(lambda *_: None)):
        return run_threads(config.plan.plan().mesh.size, rank_main)
