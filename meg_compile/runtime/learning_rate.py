"""The learning rate of a step, as a formula of the step alone: nothing to keep, nothing to restore.

The schedules are Megatron-LM's (--lr-decay-style, --lr-wsd-decay-style), whose steps count from 0 too; only warm-up is
one step ahead, so that no step has a rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
}
"""From 1 at progress 0 to 0 at progress 1."""


def learning_rates(optim: Any, steps: int) -> Callable[[int], float]:
    """lr(step) for step 0 to steps - 1, with W = warmup_steps and D = decay_steps, by default `steps`.

    Warm-up: lr (step + 1) / W. Then
    constant        lr;
    linear, cosine  from lr at step W along that shape to min_lr at step D;
    wsd             lr until wsd_decay_steps before D (Hu et al. 2024, arXiv:2404.06395, "warm-up, stable, decay"), then
                    along the shape wsd_decay to min_lr at D;
    inverse_sqrt    lr sqrt(W / step), but min_lr at least (Vaswani et al. 2017, arXiv:1706.03762, section 5.3).
    From step D on all but the first stay at min_lr.
    """
    peak, least, warmup = optim.lr, optim.min_lr, optim.warmup_steps
    end = steps if optim.decay_steps is None else optim.decay_steps
    start, shape = warmup, SHAPES.get(optim.schedule)
    if optim.schedule == "wsd":
        start, shape = end - wsd_decay_steps(optim, end), SHAPES[optim.wsd_decay]

    def lr(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if optim.schedule == "constant" or (shape and step < start):
            return peak
        if step >= end:
            return least
        if shape is None:
            return max(least, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
        return least + (peak - least) * shape((step - start) / (end - start))

    return lr


def wsd_decay_steps(optim: Any, end: int) -> int:
    """Steps of a wsd schedule's decay: by default a tenth of all, at least one."""
    return max(end // 10, 1) if optim.wsd_decay_steps is None else optim.wsd_decay_steps
