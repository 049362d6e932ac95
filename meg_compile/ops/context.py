"""A sequence that is shared out over the ranks of context parallelism, and attention over all of it.

Rank r of n holds the chunks r and 2n - 1 - r of the sequence's 2n. Under a causal mask the early chunks see little and
the late ones much, so that every rank has the same work (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2, as in
Megatron-LM). Keys and values are gathered before attention, and their gradients reduced and scattered after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from meg_compile.ops.counted import exact_attention
from meg_compile.ops.group import Group, own_chunks


def context_part(x: torch.Tensor, cp: Group, dims: list[list[tuple[int, bool]]]) -> torch.Tensor:
    """This rank's part of a value that every rank has whole; its gradient is zero elsewhere.

    dims: for each dim of x the (size, is a sequence) of its axes, major to minor.
    """
    flat = [axis for dim in dims for axis in dim]
    x = x.reshape([size for size, _ in flat])
    for i, (_, is_sequence) in enumerate(flat):
        x = own_chunks(x, i, cp) if is_sequence else x
    local = [[size // cp.size if is_sequence else size for size, is_sequence in dim] for dim in dims]
    return x.reshape([torch.Size(sizes).numel() for sizes in local])


class _Gather(torch.autograd.Function):
    """The whole sequence, in its order, from the ranks' chunks along a dim; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, cp: Group) -> torch.Tensor:
        ctx.dim, ctx.cp = dim, cp
        early, late = zip(*(part.chunk(2, dim) for part in cp.all_gather(x)), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks = (replace(ctx.cp, rank=rank) for rank in range(ctx.cp.size))
        return ctx.cp.reduce_scatter([own_chunks(grad, ctx.dim, rank) for rank in ranks]), None, None


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    cp: Group,
    *draw: Any,
) -> torch.Tensor:
    """Scaled dot product attention of this rank's queries over the whole sequence; with `draw`, dropout of its weights
    as in `exact_attention`.

    q [..., T / n, D], k [..., S / n, D], v [..., S / n, E] -> [..., T / n, E]; mask [..., T or 1, S or 1], whole.
    """
    k, v = _Gather.apply(k, k.dim() - 2, cp), _Gather.apply(v, v.dim() - 2, cp)
    if mask is not None and mask.shape[-2] > 1:
        mask = own_chunks(mask, mask.dim() - 2, cp)
    if draw:
        if is_causal:
            mask = _is_before(q, k, cp)
        return exact_attention(q, k, v, mask, False, scale, enable_gqa, *draw)
    how = {"scale": scale, "enable_gqa": enable_gqa}
    if is_causal and q.shape[-2] * cp.size != k.shape[-2]:
        mask, is_causal = _is_before(q, k, cp), False
    if not is_causal:
        return F.scaled_dot_product_attention(q, k, v, mask, **how)
    size = q.shape[-2] // 2
    chunks = zip((cp.rank, 2 * cp.size - 1 - cp.rank), q.split(size, -2), strict=True)
    return torch.cat([_eager_causal((chunk + 1) * size, queries, k, v, how) for chunk, queries in chunks], -2)


def _is_before(q: torch.Tensor, k: torch.Tensor, cp: Group) -> torch.Tensor:
    """[T / n, S]: which keys this rank's queries see under a causal mask."""
    queries = own_chunks(torch.arange(q.shape[-2] * cp.size, device=q.device), 0, cp)
    return torch.arange(k.shape[-2], device=q.device) <= queries[:, None]


def _causal(end: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """Causal attention of the queries that end at `end`."""
    mask = causal_lower_right(q.shape[-2], end)
    return F.scaled_dot_product_attention(q, k[..., :end, :], v[..., :end, :], attn_mask=mask, **how)


# torch.compile cannot trace this mask, and with another one attention takes a slower kernel.
_eager_causal: Any = torch.compiler.disable(_causal)
