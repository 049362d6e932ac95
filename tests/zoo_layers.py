"""Attention and feed-forward layers as people write them, for the models of `zoo_models.py`.

B batch, T tokens, C hidden, H heads, D head size, F feed-forward size.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, HIDDEN, HEADS, FFN = 6, 16, 4, 32

# Attention


class Heads(nn.Module):
    """Separate q, k, v; a subclass says how they attend. kv heads are shared by HEADS / kv queries each."""

    def __init__(self, heads: int = HEADS, kv: int | None = None, hidden: int = HIDDEN, bias: bool = True):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv or heads, hidden // heads
        self.q = nn.Linear(hidden, heads * self.size, bias)
        self.k = nn.Linear(hidden, self.kv * self.size, bias)
        self.v = nn.Linear(hidden, self.kv * self.size, bias)
        self.o = nn.Linear(heads * self.size, hidden, bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (
            f(x_BTC).view(B, T, n, self.size).transpose(1, 2)
            for f, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv))
        )
        y_BHTD = self.attend(q, k, v)
        return self.o(y_BHTD.transpose(1, 2).reshape(B, T, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Cached(Heads):
    """Keys and values join a cache that is empty yet, a tensor of one dim; the mask is a buffer of numbers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), float("-inf")).triu(1), persistent=False)

    def attend(self, q, k, v):
        k, v = (torch.cat([torch.tensor([], dtype=y.dtype, device=y.device), y], dim=-2) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[: k.size(2), : k.size(2)])


class Interleaved(Heads):
    def attend(self, q, k, v):
        k, v = (y.repeat_interleave(self.heads // self.kv, dim=1) for y in (k, v))
        return super().attend(q, k, v)


class Expanded(Heads):
    def attend(self, q, k, v):
        B, _, T, D = k.shape
        more = self.heads // self.kv
        k, v = (y[:, :, None].expand(B, self.kv, more, T, D).reshape(B, self.heads, T, D) for y in (k, v))
        return super().attend(q, k, v)


class Grouped(Heads):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Masked(Heads):
    """Softmax by hand under a mask buffer that is larger than needed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

    def attend(self, q, k, v):
        T = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(self.size)
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ v


class Einsum(Masked):
    def attend(self, q, k, v):
        T = q.shape[2]
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.size**-0.5
        scores = torch.where(self.mask[0, 0, :T, :T].bool(), scores, torch.finfo(scores.dtype).min)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class Rotary(Heads):
    def attend(self, q, k, v):
        T, D = q.shape[-2:]
        inverse = 1.0 / (100.0 ** (torch.arange(0, D, 2, device=q.device, dtype=q.dtype) / D))
        angles = torch.outer(torch.arange(T, device=q.device, dtype=q.dtype), inverse)
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return super().attend(self.turn(q, cos, sin), self.turn(k, cos, sin), v)

    @staticmethod
    def turn(x, cos, sin):
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cos + torch.cat([-right, left], dim=-1) * sin


class ComplexRotary(Heads):
    """Pairs of entries turned as complex numbers."""

    def attend(self, q, k, v):
        T, D = q.shape[-2:]
        rates = 100.0 ** (-torch.arange(0, D, 2, device=q.device, dtype=q.dtype) / D)
        angles = torch.outer(torch.arange(T, device=q.device, dtype=q.dtype), rates)
        turns = torch.polar(torch.ones_like(angles), angles)
        return super().attend(self.turn(q, turns), self.turn(k, turns), v)

    @staticmethod
    def turn(x, turns):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)


class Fourier(Heads):
    """Queries and keys through complex numbers that no rule knows: whole, and read beside shards of the values."""

    def attend(self, q, k, v):
        q, k = (torch.fft.fft(x).real for x in (q, k))
        return super().attend(q, k, v)


class NormedHeads(Heads):
    """A norm per head on q and k: whole parameters that every rank reads on its own heads."""

    def __init__(self, norm: str = "layer", **options):
        super().__init__(**options)
        make = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "by_hand": HandRMS}[norm]
        self.q_norm, self.k_norm = make(self.size), make(self.size)

    def attend(self, q, k, v):
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class HandRMS(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Alibi(Masked):
    """Slopes per head, in a buffer: a constant that is cut with the heads."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, self.heads + 1))

    def attend(self, q, k, v):
        T = q.shape[2]
        at = torch.arange(T, device=q.device)
        scores = q @ k.transpose(-2, -1) + self.slopes.view(1, -1, 1, 1) * (at[None, :] - at[:, None])
        return scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")).softmax(-1) @ v


class Sinks(Masked):
    """A learnt scale per head and a learnt logit per head beside the keys'."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(self.heads, 1, 1))
        self.sink = nn.Parameter(torch.zeros(self.heads))

    def attend(self, q, k, v):
        B, H, T, _ = q.shape
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        scores = torch.cat([scores, self.sink.view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v


class TalkingHeads(Masked):
    """A linear map over the heads axis: it contracts what would be sharded and makes it again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.talk = nn.Parameter(torch.eye(self.heads))

    def attend(self, q, k, v):
        scores = torch.einsum("bhid,bhjd,hg->bgij", q, k, self.talk)
        return scores.softmax(-1) @ v


class Gated(Heads):
    """One projection for q, k, v and an output gate, of different widths, cut by slices."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.q, self.k, self.v
        self.qkvg = nn.Linear(HIDDEN, 4 * HIDDEN)

    def forward(self, x_BTC):
        B, T, C = x_BTC.shape
        y = self.qkvg(x_BTC)
        q, k, v, gate = y[..., :C], y[..., C : 2 * C], y[..., 2 * C : 3 * C], y[..., 3 * C :]
        q, k, v = (z.view(B, T, self.heads, self.size).transpose(1, 2) for z in (q, k, v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2) * gate.sigmoid())


class GroupedFused(nn.Module):
    """Grouped kv heads in one projection: the q heads of a group, then its k and its v (as Falcon's)."""

    def __init__(self, kv: int = 4, group: int = 2):
        super().__init__()
        self.kv, self.group, self.size = kv, group, 2
        self.qkv = nn.Linear(HIDDEN, kv * (group + 2) * self.size)
        self.o = nn.Linear(kv * group * self.size, HIDDEN)

    def forward(self, x_BTC):
        B, T, _ = x_BTC.shape
        y = self.qkv(x_BTC).view(B, T, self.kv, self.group + 2, self.size)
        q, k, v = y.split([self.group, 1, 1], dim=3)
        k, v = (z.expand(B, T, self.kv, self.group, self.size) for z in (k, v))
        q, k, v = (z.reshape(B, T, -1, self.size).transpose(1, 2) for z in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))


# Feed-forward


class Mlp(nn.Module):
    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedSwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Glu(FusedSwiGlu):
    def forward(self, x):
        return self.down(F.glu(self.gate_up(x), dim=-1))


class Lora(nn.Module):
    """A frozen-size low-rank pair beside each Linear: both halves follow their host's axis."""

    def __init__(self, rank: int = 4):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.a1, self.b1 = nn.Linear(HIDDEN, rank, bias=False), nn.Linear(rank, FFN, bias=False)
        self.a2, self.b2 = nn.Linear(FFN, rank, bias=False), nn.Linear(rank, HIDDEN, bias=False)

    def forward(self, x):
        h = torch.relu(self.fc1(x) + 0.5 * self.b1(self.a1(x)))
        return self.fc2(h) + 0.5 * self.b2(self.a2(h))


class Chain(nn.Module):
    """Linears without anything between: an axis may be made and contracted by neighbours on either side."""

    def __init__(self, sizes: tuple[int, ...] = (HIDDEN, 32, 24, 32, HIDDEN)):
        super().__init__()
        self.maps = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    def forward(self, x):
        return self.maps(x)


class NormedFfn(nn.Module):
    """Something between the pair that needs its axis whole."""

    def __init__(self, kind: str):
        super().__init__()
        self.fc1, self.fc2, self.kind = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN), kind
        self.norm = nn.LayerNorm(FFN) if kind == "norm" else HandRMS(FFN) if kind == "rms" else nn.Identity()

    def forward(self, x):
        h = self.norm(self.fc1(x))
        if self.kind == "softmax":
            h = h.softmax(-1)
        elif self.kind == "max":
            h = h - h.amax(-1, keepdim=True)
        elif self.kind == "cumsum":
            h = h.cumsum(-1) * 0.1
        elif self.kind == "standardise":
            h = (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)
        elif self.kind == "flip":
            h = h + h.flip(-1)
        elif self.kind == "sort":
            h = h.sort(-1).values
        elif self.kind == "pick":
            h = h + h[..., :1] + h[..., 7:8]
        elif self.kind == "position":
            h = h * (1 + torch.arange(FFN, device=h.device).to(h.dtype)) * 0.1
        elif self.kind == "sum":
            h = h * 0.1 + h.sum(-1, keepdim=True) * 0.05
        return self.fc2(torch.tanh(h))


class Experts(nn.Module):
    """All experts on all tokens, weighted by a softmax: three-dimensional weights in einsums."""

    def __init__(self, num: int = 3):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num)
        self.up = nn.Parameter(torch.randn(num, HIDDEN, FFN) * 0.1)
        self.down = nn.Parameter(torch.randn(num, FFN, HIDDEN) * 0.1)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        h = F.gelu(torch.einsum("btc,ecf->btef", x, self.up))
        return torch.einsum("btef,efc,bte->btc", h, self.down, weights)


class Reweighted(nn.Module):
    """Weights that are used through a function of themselves, the second one optionally with a norm of its rows."""

    def __init__(self, row: bool = False):
        super().__init__()
        self.fc1, self.fc2, self.row = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN), row
        self.scale = nn.Parameter(torch.ones(FFN, 1))

    def forward(self, x):
        first = self.fc1.weight * self.scale / self.fc1.weight.square().sum(1, keepdim=True).add(1).sqrt()
        second = torch.tanh(self.fc2.weight)
        if self.row:
            second = second / self.fc2.weight.square().sum(1, keepdim=True).add(1).sqrt()
        return F.linear(torch.tanh(F.linear(x, first, self.fc1.bias)), second, self.fc2.bias)


class Mirror(nn.Module):
    """One matrix as both halves of a pair, and matrices kept [in, out] (addmm, as Hugging Face's GPT-2)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, FFN) * 0.2)
        self.b1, self.b2 = nn.Parameter(torch.zeros(FFN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x):
        flat = x.view(-1, HIDDEN)
        h = torch.tanh(torch.addmm(self.b1, flat, self.weight))
        return torch.addmm(self.b2, h, self.weight.t()).view(x.shape)


class EinsumRms(Mlp):
    """A mean square as an einsum of a value with itself."""

    def forward(self, x):
        square = torch.einsum("btc,btc->bt", x, x)[..., None] / HIDDEN
        return super().forward(x * torch.rsqrt(square + 1e-5))


class InPlace(Mlp):
    def forward(self, x):
        h = self.fc1(x)
        h.mul_(0.5).add_(1)
        h = F.relu(h, inplace=True)
        y = self.fc2(h)
        y += 0.25
        return y


class Dropless(Mlp):
    def forward(self, x):
        return F.dropout(self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.0)), 0.0)
