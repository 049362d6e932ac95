"""Tensor parallelism by hand, as in Megatron-LM: what an expert would make of the plain model.

Collectives work in place, over all ranks. q, k and v share one f; a row-parallel Linear adds its bias after g.
Embedding, head and loss are parallel over the vocabulary; the loss takes two all-reduces, its maximum and its sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model import GPT


class CopyToTP(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromTP(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class VocabCrossEntropy(torch.autograd.Function):
    """logits [N, V / tp] (overwritten), target [N] -> the mean loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        size = logits.shape[1]
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        logits -= top[:, None]
        local = target - dist.get_rank() * size
        elsewhere = (local < 0) | (local >= size)
        local.masked_fill_(elsewhere, 0)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill_(elsewhere, 0)
        exp = logits.exp_()
        sums = torch.stack([exp.sum(1), picked])
        dist.all_reduce(sums)
        ctx.save_for_backward(exp, sums[0], local, elsewhere)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exp, total, local, elsewhere = ctx.saved_tensors
        scale = grad / len(total)
        softmax = exp.mul_((scale / total)[:, None])
        softmax.scatter_add_(1, local[:, None], torch.where(elsewhere, 0, -scale)[:, None])
        return softmax, None


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CopyToTP.apply(x)


class ColumnLinear(nn.Module):
    def __init__(self, whole: nn.Linear):
        super().__init__()
        self.weight = shard(whole.weight, 0)
        self.bias = None if whole.bias is None else shard(whole.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, whole: nn.Linear):
        super().__init__()
        self.weight, self.bias = shard(whole.weight, 1), whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromTP.apply(F.linear(x, self.weight)) + self.bias


class VocabEmbedding(nn.Module):
    def __init__(self, whole: nn.Embedding):
        super().__init__()
        self.weight = shard(whole.weight, 0)

    def forward(self, index: Tensor) -> Tensor:
        local = index - dist.get_rank() * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return ReduceFromTP.apply(rows.masked_fill_(elsewhere[..., None], 0))


def shard(whole: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


def tensor_parallel(model: GPT) -> GPT:
    """Replace the model's layers, in place, by this rank's. Its logits [B, T, V / tp] go into `loss`."""
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        attn.q, attn.k, attn.v = ColumnLinear(attn.q), ColumnLinear(attn.k), ColumnLinear(attn.v)
        attn.o = RowLinear(attn.o)
        mlp.up, mlp.down = ColumnLinear(mlp.up), RowLinear(mlp.down)
        block.attn, block.mlp = nn.Sequential(Copy(), attn), nn.Sequential(Copy(), mlp)
    model.embedding.tokens = VocabEmbedding(model.embedding.tokens)
    model.head = nn.Sequential(Copy(), ColumnLinear(model.head))
    return model


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return VocabCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
