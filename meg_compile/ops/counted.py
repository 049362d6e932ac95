"""Dropout whose masks depend on nothing but what is dropped: the seed, the step, the row of the run, the place in the
model and the position in the value.

A mask is a hash of counters (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so whoever holds
whatever part of a value, in whatever micro-batch, draws the same mask for it, any number of times. The hash is the
output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from meg_compile.ops.group import Group, own_chunks

Places = list[list[tuple[int, str]]]
"""For each dim of a value its axes, major to minor, as (whole size, part): "batch" for the rows of the batch; "tp",
"cp" or "cp tp" for an axis of which each rank of those mesh dims holds its part; "" for one that is whole."""

ALONE = Group()
GOLDEN = -7046029254386353131
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)


def mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's hash of int64 numbers, in place."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z.bitwise_xor_(_shifted(z, shift)).mul_(multiplier)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def row_keys(seed: int, step: int, rows: list[int]) -> torch.Tensor:
    """The keys of a step: int64 [rows, 2], one of each row's own (rows counted from 0 over the whole run) and one that
    all rows of the step share."""
    base = mix(torch.tensor([seed, ~seed]))
    rows_key = mix(torch.tensor(rows) * GOLDEN + base[:1])
    step_key = mix(_wrapped(step) + base[1:])
    return torch.stack([rows_key, step_key.expand(len(rows))], 1)


def keep_mask(
    keys: torch.Tensor, p: float, site: int, places: Places, of_rows: bool, tp: Group = ALONE, cp: Group = ALONE
) -> torch.Tensor:
    """Which entries of this rank's part of a value are kept, each with probability 1 - p.

    keys int64 [rows, 2]; site counts the model's dropouts; of_rows: the value has a part for each row (places says
    where; with one row it need not), else it is the same for all rows of the step.
    """
    key = mix((keys[:, 0] if of_rows else keys[:1, 1]) + _wrapped(site + 1))
    stride = math.prod([size for dim in places for size, part in dim if part != "batch"])
    counters, has_rows = [], False
    for dim in places:
        vector = torch.zeros((), dtype=torch.int64, device=keys.device)
        for size, part in dim:
            if part == "batch":
                own, has_rows = key, True
            else:
                stride //= size
                own = _own(torch.arange(size, device=keys.device), part, tp, cp) * _wrapped(stride)
            vector = vector[..., None] + own
        counters.append(vector.reshape(-1))
    total = counters[0] if counters else torch.zeros((), dtype=torch.int64, device=keys.device)
    for vector in counters[1:]:
        total = total[..., None] + vector
    hashed = mix(total.clone() if has_rows else total + key[0])
    return _shifted(hashed, 11) >= round(p * 2**53)


def _own(index: torch.Tensor, part: str, tp: Group, cp: Group) -> torch.Tensor:
    if "cp" in part:
        index = own_chunks(index, 0, cp)
    if "tp" in part:
        size = -(-len(index) // tp.size)
        index = F.pad(index, (0, size * tp.size - len(index))).narrow(0, size * tp.rank, size)
    return index


def _wrapped(count: int) -> int:
    """count * GOLDEN as a signed number of 64 bits."""
    return (count * GOLDEN + 2**63) % 2**64 - 2**63


@torch.library.custom_op("meg_compile::keep_mask", mutates_args=())
def _opaque_keep_mask(
    keys: torch.Tensor,
    p: float,
    site: int,
    dims: list[int],
    sizes: list[int],
    parts: str,
    of_rows: bool,
    ranks: list[int],
    shape: list[int],
) -> torch.Tensor:
    """`keep_mask` for torch.compile, whose arithmetic on indices does not wrap at 64 bits as hashes must."""
    places: Places = [[] for _ in range(ranks[0])]
    for dim, size, part in zip(dims, sizes, parts.split(","), strict=True):
        places[dim].append((size, part))
    return keep_mask(keys, p, site, places, of_rows, Group(ranks[1], ranks[2]), Group(ranks[3], ranks[4])).reshape(
        shape
    )


@_opaque_keep_mask.register_fake
def _(keys: torch.Tensor, p: float, site: int, dims, sizes, parts, of_rows, ranks, shape: list[int]) -> torch.Tensor:
    return keys.new_empty(shape, dtype=torch.bool)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


def exact_dropout(
    x: torch.Tensor,
    keys: torch.Tensor,
    p: float,
    site: int,
    places: Places,
    of_rows: bool = True,
    tp: Group = ALONE,
    cp: Group = ALONE,
) -> torch.Tensor:
    """x with entries set to 0 with probability p and the others divided by 1 - p; arguments as of `keep_mask`."""
    if x.is_meta:
        keep = x.new_empty(x.shape, dtype=torch.bool)
    elif torch.compiler.is_compiling():
        flat = [(dim, size, part) for dim, axes in enumerate(places) for size, part in axes]
        dims, sizes, parts = [dim for dim, _, _ in flat], [size for _, size, _ in flat], [part for _, _, part in flat]
        ranks = [len(places), tp.size, tp.rank, cp.size, cp.rank]
        keep = _opaque_keep_mask(keys, p, site, dims, sizes, ",".join(parts), of_rows, ranks, x.shape)
    else:
        keep = keep_mask(keys, p, site, places, of_rows, tp, cp)
    return _Masked.apply(x, keep.view(x.shape), p)


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *draw: Any,
) -> torch.Tensor:
    """Scaled dot product attention, written out, with `exact_dropout(weights, *draw)` of its weights [..., T, S].

    q [..., T, D], k [..., S, D], v [..., S, E] -> [..., T, E].
    """
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.ops.aten._safe_softmax(scores, -1)  # zeros, not nan, in a row that the mask hides whole
    return exact_dropout(weights, *draw) @ v
