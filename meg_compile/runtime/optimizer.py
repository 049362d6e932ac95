"""The optimizer over a rank's own parameters, its learning rate and the clipping of gradients.

All of them act on single numbers, so on shards they do what they would do on whole parameters, given the norm of all
gradients together.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def build_optimizer(parameters: Mapping[str, nn.Parameter], optim: Any) -> torch.optim.Optimizer:
    """`optim` is the config's section of that name: adamw or sgd.

    With `decay` "matrices" the weight decay leaves out what has less than two dims (biases and norms), with "all"
    nothing. A rank without parameters gets an optimizer that does nothing.
    """
    unique = list(dict.fromkeys(parameters.values()))
    decays = [parameter for parameter in unique if optim.decay == "all" or parameter.dim() >= 2]
    spared = [parameter for parameter in unique if optim.decay != "all" and parameter.dim() < 2]
    groups = [{"params": decays, "weight_decay": optim.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, fused=True)


def learning_rates(optim: Any, steps: int) -> Callable[[int], float]:
    """lr(step) for step 0 to steps - 1.

    Warm-up: lr * (step + 1) / warmup_steps. Then "constant" stays at lr, and "cosine" falls from lr, at step
    warmup_steps, along half a cosine wave to min_lr, which it would reach at step `steps`.
    """

    def lr(step: int) -> float:
        if step < optim.warmup_steps:
            return optim.lr * (step + 1) / optim.warmup_steps
        if optim.schedule == "constant":
            return optim.lr
        progress = min((step - optim.warmup_steps) / max(steps - optim.warmup_steps, 1), 1.0)
        return optim.min_lr + 0.5 * (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * progress))

    return lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_(parameters: Mapping[str, nn.Parameter], norm: float, clip_grad: float) -> None:
    """Scale the gradients by clip_grad / (norm + 1e-6) where that is below 1, as torch's clip_grad_norm_ does.

    norm: that of all gradients of the model, not of this rank's. clip_grad 0: no clipping.
    """
    if clip_grad:
        total_norm = torch.tensor(norm, dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(dict.fromkeys(parameters.values()), clip_grad, total_norm)
