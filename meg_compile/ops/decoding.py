"""Attention of the newest tokens over all tokens so far, whose keys and values a cache keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from meg_compile.ops.group import Group


@dataclass
class Decoding:
    """Where decoding stands, on one rank.

    total: positions that the caches have room for. start: the position of the first new token.
    caches: of each attention the keys [..., total, D] and values [..., total, E] up to there.
    """

    total: int
    start: int = 0
    caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def extended(self, site: int, new: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """All keys and values [..., start + n, D] of an attention after n new ones [..., n, D]."""
        if site not in self.caches:
            key, value = (x.new_zeros(*x.shape[:-2], self.total, x.shape[-1]) for x in new)
            self.caches[site] = key, value
        end = self.start + new[0].shape[-2]
        for cache, x in zip(self.caches[site], new, strict=True):
            cache[..., self.start : end, :] = x
        return [cache[..., :end, :] for cache in self.caches[site]]


def newest_part(x: torch.Tensor, at: Decoding, dims: list[list[tuple[int, bool]]], new: int) -> torch.Tensor:
    """The entries of a whole value that belong to the `new` newest tokens.

    dims: for each dim of x the (size, is a sequence) of its axes, major to minor.
    """
    x = x.reshape([size for dim in dims for size, _ in dim])
    for i, is_sequence in enumerate(is_sequence for dim in dims for _, is_sequence in dim):
        x = x.narrow(i, at.start, new) if is_sequence else x
    local = [[new if is_sequence else size for size, is_sequence in dim] for dim in dims]
    return x.reshape([torch.Size(sizes).numel() for sizes in local])


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    at: Decoding,
    site: int,
) -> torch.Tensor:
    """Scaled dot product attention of n new tokens over those before them and themselves.

    q [..., n, D], k [..., n, D], v [..., n, E] -> [..., n, E]; mask [..., total or 1, total or 1], whole, which hides
    what comes later. site counts the model's attentions.
    """
    how = {"scale": scale, "enable_gqa": enable_gqa}
    new = q.shape[-2]
    if q.is_meta:
        return F.scaled_dot_product_attention(q, k, v, **how)
    k, v = at.extended(site, (k, v))
    end = at.start + new
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else mask[..., at.start : end, :]
        mask = mask if mask.shape[-1] == 1 else mask[..., :end]
    elif is_causal and new > 1:
        mask = causal_lower_right(new, end)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how)


def gather_logits(logits: torch.Tensor, tp: Group, num_classes: int) -> torch.Tensor:
    """Logits [..., V / n padded] of the ranks' parts of a vocabulary as [..., V]."""
    return torch.cat(list(tp.all_gather(logits)), -1)[..., :num_classes]


def all_logits(logits: torch.Tensor) -> torch.Tensor:
    """What a decoder gives: logits [..., V]. The vocabulary may be shared out before it."""
    return logits
