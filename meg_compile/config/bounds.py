"""The least and the most that a single setting may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meg_compile.errors import Fault

# key -> (smallest value, whether that value itself is allowed, what it is); whole numbers have a largest one too
BOUNDS: dict[str, tuple[float, bool, str]] = {
    "train.steps": (0, True, "a count"),
    "train.micro_batch_size": (1, True, "a count of rows"),
    "train.global_batch_size": (1, True, "a count of rows"),
    "train.seed": (0, True, "a seed"),
    "train.clip_grad": (0, True, "a norm; 0 turns clipping off"),
    "train.loss_scale": (0, False, "a factor"),
    "optim.lr": (0, False, "a step size"),
    "optim.min_lr": (0, True, "a step size"),
    "optim.warmup_steps": (0, True, "a count of steps"),
    "optim.weight_decay": (0, True, "a rate"),
    "optim.warmup_fraction": (0, True, "a share of all steps"),
    "optim.decay_steps": (1, True, "a count of steps"),
    "optim.wsd_decay_steps": (1, True, "a count of steps"),
    "optim.eps": (0, False, "a small positive number"),
    "optim.momentum": (0, True, "a rate"),
    "eval.every": (1, True, "a count of steps"),
    "eval.batches": (1, True, "a count of batches"),
    "train.check_replicas": (1, True, "a count of steps"),
    "log.every": (1, True, "a count of steps"),
    "log.peak_tflops": (0, False, "10^12 operations a second"),
    "verify.steps": (1, True, "a count of steps"),
    "verify.tolerance": (0, False, "a relative error"),
    "launch.nproc": (1, True, "a count of processes"),
    "launch.threads": (1, True, "a count of threads"),
    "launch.timeout": (0, False, "a time in seconds"),
    "launch.max_restarts": (0, True, "a count"),
    "export.max_shard_gb": (0, False, "a size in gigabytes"),
    "checkpoint.every": (1, True, "a count of steps"),
    "checkpoint.keep": (1, True, "a count of checkpoints"),
    "checkpoint.keep_every": (1, True, "a count of steps"),
    "generate.tokens": (1, True, "a count of tokens"),
    "generate.temperature": (0, True, "a divisor of logits; 0 takes the likeliest token"),
    "generate.top_k": (1, True, "a count of tokens"),
    "generate.top_p": (0, False, "a probability"),
    "generate.seed": (0, True, "a seed"),
    "generate.rows": (1, True, "a count of texts"),
    "explain.block": (0, True, "a position"),
    "data.seq_len": (1, True, "a count of tokens"),
}
LARGEST = 2**31 - 1
MOST = {"train.seed": 2**63 - 1, "launch.threads": 1024, "launch.nproc": 4096}
MOST |= {"generate.seed": 2**63 - 1}
MOST |= dict.fromkeys(("train.micro_batch_size", "train.global_batch_size", "data.seq_len"), 2**24)
EXAMPLES = {
    "log.peak_tflops": "989",
    "optim.lr": "0.001",
    "train.loss_scale": "65536",
    "optim.eps": "1e-08",
    "verify.tolerance": "1e-09",
    "export.max_shard_gb": "5",
    "launch.timeout": "600",
    "generate.top_p": "0.9",
}


def bounds(v: Mapping[str, Any]) -> list[Fault]:
    """What is wrong with single numbers."""
    faults = []
    for key, (least, inclusive, meaning) in BOUNDS.items():
        value = v.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        most = MOST.get(key, LARGEST)
        if isinstance(value, int) and value > most:
            faults.append(Fault(key, value, f"is {meaning}, and none is so large", f"use {most} or less"))
            continue
        enough = value >= least if inclusive else value > least
        if enough and (isinstance(value, int) or math.isfinite(value)):
            continue
        fix = f"use {key}={EXAMPLES.get(key, least)}" + (" or more" if inclusive else ", say")
        faults.append(Fault(key, value, f"is {meaning}, so it cannot be {value}", fix))
    return faults
