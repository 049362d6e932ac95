"""The other side of the comparison: the plain model, trained in one process on the whole global batch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from meg_compile.graph.capture import bind, find_logits, find_loss
from meg_compile.ops.counted import Places, row_keys
from meg_compile.passes.tokens import HALVES
from meg_compile.runtime.learning_rate import learning_rates
from meg_compile.runtime.optimizer import build_optimizer, set_lr
from meg_compile.runtime.watch import progress
from meg_compile.train.batches import DTYPES, batches_of
from meg_compile.verify.dropout import DropoutExact, DropoutOff


class Plain:
    """The user's model as they would train it: seed, build, widen, then `gradients` and `update` step by step.

    factory builds the model; loss is for models that return logits. draws: those of the compiled program
    (`Program.draws`); with none dropout is off. In half precision the weights are float32, forward reads them rounded,
    a micro-batch at a time, and logits are widened for the loss: then sums over many rows are in float32, where kernels
    such as the CPU's layer norm backward would add them up in half precision. (A model that returns its loss reads the
    whole batch at once.)
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
        self.dtype = DTYPES[config.precision]
        self.model = factory().to(device=device, dtype=torch.float32 if self.dtype in HALVES else self.dtype).train()
        for module in self.model.modules():
            module.register_forward_hook(lambda *_: progress())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda _: progress())
        self.rows = config.train.micro_batch_size
        self.loss, self.device, self.clip_grad = loss, device, config.train.clip_grad
        self.seed, self.draws = config.train.seed, draws
        self.batches = batches_of(config, dataset)
        self.lr = learning_rates(config.optim, config.train.steps)
        self.optimizer = build_optimizer(self.parameters(), config.optim)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Under all their names: a tied one is there several times."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def gradients(self, step: int, scale: float = 1.0) -> tuple[float, float]:
        """(loss, norm of the whole gradient) of the global batch; the gradients stay at the parameters.

        scale: multiplies the loss in backward, for fp16; halved as long as gradients overflow.
        """
        batch = {field: tensor.to(self.device) for field, tensor in self.batches[step].items()}
        rows = [position for position, _ in self.batches.rows(step)]
        keys = row_keys(self.seed, step, rows).to(self.device)
        with nullcontext() if self.draws else DropoutOff():
            return self._backward(_widened(self._loss(batch, keys)), scale)

    def _backward(self, loss: torch.Tensor, scale: float) -> tuple[float, float]:
        while True:
            (loss * scale).backward(retain_graph=scale > 1)
            grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(grads, 1 / scale)
            norm = torch.nn.utils.get_total_norm(grads).item()
            if math.isfinite(norm) or scale <= 1:
                return loss.detach().item(), norm
            self.optimizer.zero_grad()
            scale /= 2

    def _loss(self, batch: dict[str, torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
        out = self._forward(batch, keys)
        if (loss := find_loss(out)) is not None:
            return loss
        assert self.loss is not None, "the model returns no loss, and none is configured"
        logits, num_rows = find_logits(out), len(batch["labels"])
        if self.dtype in HALVES and len(logits) == num_rows:
            split = zip(*(t.split(self.rows) for t in batch.values()), strict=True)
            parts = zip((dict(zip(batch, rows, strict=True)) for rows in split), keys.split(self.rows), strict=True)
            logits = torch.cat([find_logits(self._forward(*part)) for part in parts])
        return self.loss(_widened(logits), batch["labels"])

    def _forward(self, batch: dict[str, torch.Tensor], keys: torch.Tensor) -> Any:
        arguments = {param: batch[field] for field, param in bind(self.model, batch).items()}
        dropout = DropoutExact(self.draws, keys) if self.draws else nullcontext()
        with dropout, self._rounded() if self.dtype in HALVES else nullcontext():
            return self.model(**arguments)

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Inside, every module finds half-precision copies of its tensors, made by autograd, in their place."""
        stores: list[dict[str, Any]] = [s for m in self.model.modules() for s in (m._parameters, m._buffers)]
        before = [dict(store) for store in stores]
        wide = {id(t): t for store in stores for t in store.values() if t is not None and t.is_floating_point()}
        copies = {key: tensor.to(self.dtype) for key, tensor in wide.items()}
        try:
            for store in stores:
                store.update({name: copies.get(id(tensor), tensor) for name, tensor in store.items()})
            yield
        finally:
            for store, tensors in zip(stores, before, strict=True):
                store.update(tensors)

    def update(self, step: int) -> None:
        if self.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        set_lr(self.optimizer, self.lr(step))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALVES else value
