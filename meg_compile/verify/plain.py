"""The other side of the comparison: the plain model, trained in one process on the whole global batch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meg_compile.graph.capture import bind, find_logits, find_loss
from meg_compile.passes.tokens import HALVES
from meg_compile.runtime.optimizer import build_optimizer, learning_rates, set_lr
from meg_compile.train.batches import DTYPES, batches_of
from meg_compile.verify.dropout import DropoutOff


class Plain:
    """The user's model as they would train it: seed, build, widen, then `gradients` and `update` step by step.

    factory builds the model; loss is for models that return logits. Dropout is off. In half precision the weights are
    float32, forward reads them rounded (so that their gradients are summed in float32), and logits are widened for the
    loss.
    """

    def __init__(self, config: Any, factory: Callable[[], nn.Module], loss: Callable | None, dataset: Any, device):
        torch.manual_seed(config.train.seed)
        self.dtype = DTYPES[config.precision]
        self.model = factory().to(device=device, dtype=torch.float32 if self.dtype in HALVES else self.dtype).train()
        self.loss, self.device, self.clip_grad = loss, device, config.train.clip_grad
        self.batches = batches_of(config, dataset)
        self.lr = learning_rates(config.optim, config.train.steps)
        self.optimizer = build_optimizer(dict(self.model.named_parameters()), config.optim)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Under all their names: a tied one is there several times."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def gradients(self, step: int, scale: float = 1.0) -> tuple[float, float]:
        """(loss, norm of the whole gradient) of the global batch; the gradients stay at the parameters.

        scale: multiplies the loss in backward, for fp16; halved as long as gradients overflow.
        """
        batch = {field: tensor.to(self.device) for field, tensor in self.batches[step].items()}
        with DropoutOff():
            arguments = {param: batch[field] for field, param in bind(self.model, batch).items()}
            out = self._forward(arguments)
            loss = find_loss(out)
            if loss is None:
                assert self.loss is not None, "the model returns no loss, and none is configured"
                loss = self.loss(_widened(find_logits(out)), batch["labels"])
        loss = _widened(loss)
        while True:
            (loss * scale).backward(retain_graph=scale > 1)
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(grads, 1 / scale)
            norm = torch.nn.utils.get_total_norm(grads).item()
            if math.isfinite(norm) or scale <= 1:
                return loss.detach().item(), norm
            self.optimizer.zero_grad()
            scale /= 2

    def _forward(self, arguments: dict[str, torch.Tensor]) -> Any:
        if self.dtype not in HALVES:
            return self.model(**arguments)
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        rounded = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        return torch.func.functional_call(self.model, rounded, kwargs=arguments)

    def update(self, step: int) -> None:
        if self.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        set_lr(self.optimizer, self.lr(step))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALVES else value
