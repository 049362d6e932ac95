"""The other side of the comparison: the plain model, trained in one process on the whole global batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meg_compile.graph.capture import bind, find_logits, find_loss
from meg_compile.ops.counted import Places, row_keys
from meg_compile.runtime.optimizer import build_optimizer, learning_rates, set_lr
from meg_compile.train.batches import DTYPES, batches_of
from meg_compile.verify.dropout import DropoutExact, DropoutMode, DropoutOff


class Plain:
    """The user's model as they would train it: seed, build, widen, then `gradients` and `update` step by step.

    factory builds the model; loss is for models that return logits. draws: those of the compiled program
    (`Program.draws`); with none dropout is off.
    """

    def __init__(
        self,
        config: Any,
        factory: Callable[[], nn.Module],
        loss: Callable | None,
        dataset: Any,
        device: torch.device,
        draws: list[tuple[Places, bool]],
    ):
        torch.manual_seed(config.train.seed)
        self.model = factory().to(device=device, dtype=DTYPES[config.precision]).train()
        self.loss, self.device, self.clip_grad = loss, device, config.train.clip_grad
        self.seed, self.draws = config.train.seed, draws
        self.batches = batches_of(config, dataset)
        self.lr = learning_rates(config.optim, config.train.steps)
        self.optimizer = build_optimizer(dict(self.model.named_parameters()), config.optim)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Under all their names: a tied one is there several times."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def gradients(self, step: int) -> tuple[float, float]:
        """(loss, norm of the whole gradient) of the global batch; the gradients stay at the parameters."""
        batch = {field: tensor.to(self.device) for field, tensor in self.batches[step].items()}
        with self._dropout(step):
            arguments = {param: batch[field] for field, param in bind(self.model, batch).items()}
            out = self.model(**arguments)
            loss = find_loss(out)
            if loss is None:
                assert self.loss is not None, "the model returns no loss, and none is configured"
                loss = self.loss(find_logits(out), batch["labels"])
            loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return loss.detach().item(), torch.nn.utils.get_total_norm(grads).item()

    def _dropout(self, step: int) -> DropoutMode:
        if not self.draws:
            return DropoutOff()
        rows = [position for position, _ in self.batches.rows(step)]
        return DropoutExact(self.draws, row_keys(self.seed, step, rows).to(self.device))

    def update(self, step: int) -> None:
        if self.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        set_lr(self.optimizer, self.lr(step))
        self.optimizer.step()
        self.optimizer.zero_grad()
