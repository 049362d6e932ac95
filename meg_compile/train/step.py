"""One optimizer step of a compiled program, as every rank takes it."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meg_compile.errors import MegError
from meg_compile.runtime.learning_rate import learning_rates
from meg_compile.runtime.nonfinite import in_forward, in_gradients
from meg_compile.runtime.optimizer import build_optimizer, clip_, set_lr
from meg_compile.train.agree import agree
from meg_compile.train.batches import Batches, batches_of
from meg_compile.train.scale import LossScale
from meg_compile.train.timers import Timers


class Gradients(NamedTuple):
    """What a forward and backward pass over one global batch gave; the same on every rank.

    loss: mean over all `tokens` counted. norm: of the whole model's gradient, before clipping; inf or nan where it
    overflowed in fp16, so that the step is to be skipped. checksums: of the rows of each replica. stop: the signal by
    which some rank was asked to stop, 0 for none.
    """

    loss: float
    norm: float
    tokens: int
    checksums: list[int]
    stop: int = 0


class Trainer:
    """Steps of one rank: `gradients(step)`, then `update(step, norm)`; steps count from 0."""

    def __init__(self, config: Any, program: Any, executor: Any, groups: Any, dataset: Any):
        self.program, self.executor, self.groups = program, executor, groups
        self.data_name, self.clip_grad = type(dataset).__name__, config.train.clip_grad
        self.seed = config.train.seed
        self.batches: Batches = batches_of(config, dataset, groups.mesh.dp, groups.coords.dp)
        self.optimizer = build_optimizer(executor.by_name(), config.optim)
        self.scale = LossScale(config.train.loss_scale if config.precision == "fp16" else 1.0)
        self.num_skipped = 0
        self.timers = Timers(executor.device, config.log.timers)
        self.lr = learning_rates(config.optim, config.train.steps)
        self.asked: dict[int, bool] = {}
        """The signals that ask to stop, and whether this rank has got them; the same signals on every rank."""

    def gradients(self, step: int) -> Gradients:
        """Read, run all micro-batches, reduce. MegError, on all ranks, where the loss or the norm is no number."""
        rows = [position for position, _ in self.batches.rows(step)]
        with self.timers("data"):
            batch = self.program.keyed(self.batches[step], self.seed, step, rows)
        coords, device = self.groups.coords, self.executor.device
        where = f"step {step + 1}, data {self.data_name}"
        agreed = agree(
            batch, self.program.count(batch), self.groups.mesh.dp, coords.dp, device, where, self.program.labels(batch)
        )
        scale = self.scale.value
        with self.timers("forward_backward"):
            loss = self.executor.run(batch, scale * self.program.units.scale(agreed.tokens), reduce=True)
        with self.timers("reduce"):
            self.executor.reduce_gradients()
        # The last stage's tp ranks all hold their replica's share of the loss; ranks of other stages give 0.
        asked = dict(self.asked)
        mine = [loss if coords.tp == 0 else 0.0, 0.0, *map(float, asked.values())]
        sums = torch.tensor(mine, dtype=torch.float64, device=device)
        sums[1] = self.executor.norm_squared()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        loss, norm = sums[0].item() / scale, math.sqrt(sums[1].item()) / scale
        if not math.isfinite(loss):
            raise MegError(self._not_finite(step, "loss", loss, in_forward(self.executor, batch)))
        if not math.isfinite(norm) and not self.scale.may_fall:
            raise MegError(self._not_finite(step, "gradient norm", norm, in_gradients(self.executor)))
        self.executor.scale_gradients(1 / scale)
        stop = next((number for number, count in zip(asked, sums[2:].tolist(), strict=True) if count), 0)
        return Gradients(loss, norm, agreed.tokens, agreed.checksums, stop)

    def update(self, step: int, norm: float) -> float:
        """Clip, move the weights, forget the gradients. Returns the learning rate.

        Gradients that overflowed move nothing, and the learning rate's schedule waits for them.
        """
        lr = self.lr(step - self.num_skipped)
        if math.isfinite(norm):
            with self.timers("optimizer"):
                clip_(self.executor.parameters, norm, self.clip_grad)
                set_lr(self.optimizer, lr)
                self.optimizer.step()
        else:
            self.num_skipped += 1
        self.scale.update(overflow=not math.isfinite(norm))
        self.optimizer.zero_grad()
        return lr

    def _not_finite(self, step: int, what: str, value: float, where: str) -> str:
        first = f", first in {where}" if where else ""
        scale = "" if self.scale.value == 1 else f" at a loss scale of {self.scale.value:g}"
        return f"step {step + 1}: the {what} is {value}{scale}{first}; lower optim.lr, or look at the rows of this step"
