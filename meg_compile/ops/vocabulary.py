"""Embedding and cross entropy on a vocabulary that is sharded over the tp ranks.

Rank r holds the classes [r * n, (r + 1) * n), n = ceil(classes / tp). Where tp does not divide the vocabulary the last
ranks hold padding behind their real rows: no index points at it, it takes no part in a softmax, and its gradient is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meg_compile.ops.group import Group


def _here(index: torch.Tensor, size: int, tp: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices into this rank's rows, 0 where the row lies on another rank; where that is so)."""
    local = index - tp.rank * size
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill(elsewhere, 0), elsewhere


def vocab_embedding(table: torch.Tensor, index: torch.Tensor, tp: Group, padding_idx: int = -1) -> torch.Tensor:
    """Rows of a table of which this rank holds a part, zero for the rows of others: a partial sum.

    table [n, D], index [...] -> [..., D].
    """
    size = table.shape[0]
    local, elsewhere = _here(index, size, tp)
    padding = padding_idx - tp.rank * size
    held = padding_idx >= 0 and 0 <= padding < size
    rows = F.embedding(local, table, padding if held else None)
    return rows.masked_fill(elsewhere[..., None], 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, tp: Group, num_classes: int, ignore: int, owned: bool
    ):
        size = logits.shape[-1]
        real = min(max(num_classes - tp.rank * size, 0), size)
        scores = logits.detach()[:, :real]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        owned = owned or scores.dtype != logits.dtype
        top = scores.amax(-1) if real else scores.new_full(scores.shape[:1], -torch.inf)
        tp.all_reduce_(top, dist.ReduceOp.MAX)
        scores = scores.sub_(top[:, None]) if owned else scores - top[:, None]
        ignored = target == ignore
        local, elsewhere = _here(target, size, tp)
        elsewhere |= ignored
        local = local.clamp_(max=max(real - 1, 0))
        picked = scores.gather(1, local[:, None])[:, 0] if real else torch.zeros_like(top)
        exp = scores.exp_()
        sums = torch.stack([exp.sum(-1), picked.masked_fill_(elsewhere, 0)])
        tp.all_reduce_(sums)
        ctx.save_for_backward(exp, sums[0], local, elsewhere, ignored)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (sums[0].log() - sums[1]).masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        exp, total, local, elsewhere, ignored = ctx.saved_tensors
        real = exp.shape[1]
        grad = grad.masked_fill(ignored, 0)
        out = exp.mul_((grad / total)[:, None])
        if real:
            out.scatter_add_(1, local[:, None], grad.neg().masked_fill_(elsewhere, 0)[:, None])
        if real != ctx.shape[1]:
            out = F.pad(out, (0, ctx.shape[1] - real))
        return out.to(ctx.dtype), None, None, None, None, None


def vocab_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    tp: Group,
    num_classes: int,
    reduction: int = 1,
    ignore_index: int = -100,
    owned: bool = False,
) -> torch.Tensor:
    """Cross entropy of logits of which each rank holds a part of the classes; the result is whole on every rank.

    logits [N, n], target [N] of class indices < num_classes -> scalar, or [N] with reduction 0 (1 is the mean over
    the targets that are not ignore_index, 2 the sum). Two all-reduces forward (maximum [N], sums [2, N]), none back.
    The softmax is computed in float32 or wider, in the logits' memory if they are `owned`.
    """
    losses = _CrossEntropy.apply(logits, target, tp, num_classes, ignore_index, owned)
    if reduction == 0:
        return losses
    return losses.sum() if reduction == 2 else losses.sum() / (target != ignore_index).sum()
