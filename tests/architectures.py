"""Random small transformers, for tests that a compilation of any of them is right or refused.

`Architecture` says how one is put together, in the ways in which people do it; `architectures()` and `compilations()`
are hypothesis strategies. All that a field can name occurs in published models, or is there because it traps a
compiler (a norm or a softmax over the axis that would be sharded, a second reader between a pair).

B batch, T tokens, C hidden, H heads, K key/value heads, D head size, F feed-forward size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from meg_compile.plan import Plan
from meg_compile.schedules import SCHEDULES

ROWS, TOKENS = 4, 8

QKV = ("separate", "thirds", "stacked", "per_head", "grouped", "q_and_kv", "in_out")
ATTEND = ("sdpa", "mask", "by_hand", "einsum", "alibi", "window", "capped", "talking", "bidirectional")
MLP = (
    *("plain", "swiglu", "fused", "interleaved", "glu", "chain", "squared", "experts", "einsum"),
    *("softmax", "normed", "read_twice", "summed", "rolled", "scaled", "mirrored"),
)
BLOCK = ("pre", "post", "sandwich", "parallel", "one_norm", "scaled")
RESHAPE = ("none", "flat", "tokens_first", "split_hidden", "two_halves")


@dataclass(frozen=True)
class Architecture:
    """layers to mlp_bias: sizes and biases. The rest names a way to do each thing."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    bias: bool
    qkv: str
    share: str
    rope: str
    head_norm: str
    attend: str
    out: str
    mlp: str
    block: str
    norm: str
    positions: str
    reshape: str
    tied: bool
    head_bias: bool
    extra: str

    def build(self) -> nn.Module:
        return Model(self)


def architectures() -> st.SearchStrategy[Architecture]:
    return st.sampled_from([1, 2, 4, 4, 6, 8]).flatmap(
        lambda heads: st.builds(
            Architecture,
            layers=st.sampled_from([2, 2, 3, 4]),
            hidden=st.sampled_from([12, 16]),
            heads=st.just(heads),
            kv_heads=st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]),
            head_size=st.sampled_from([2, 4]),
            ffn=st.sampled_from([12, 16, 20, 24]),
            vocab=st.sampled_from([24, 29]),
            bias=st.booleans(),
            qkv=st.sampled_from(QKV),
            share=st.sampled_from(["repeat", "expand", "gqa"]),
            rope=st.sampled_from(["none", "halves", "pairs", "complex", "partial"]),
            head_norm=st.sampled_from(["none", "none", "layer", "rms", "all_heads"]),
            attend=st.sampled_from(ATTEND),
            out=st.sampled_from(["plain", "plain", "gated", "normed", "head_normed", "einsum"]),
            mlp=st.sampled_from(MLP),
            block=st.sampled_from(BLOCK),
            norm=st.sampled_from(["layer", "rms", "by_hand"]),
            positions=st.sampled_from(["none", "learnt", "sinusoids", "segments"]),
            reshape=st.sampled_from(RESHAPE),
            tied=st.booleans(),
            head_bias=st.booleans(),
            extra=st.sampled_from(["none", "none", "capped", "hidden_loss", "z_loss", "skip", "reused_block"]),
        )
    )


SIZES = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
PIPELINES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)]


@st.composite
def compilations(draw: st.DrawFn) -> tuple[Architecture, Plan, int]:
    """An architecture, a plan for up to 4 ranks, and the rows of a micro-batch."""
    made = draw(architectures())
    tp, pp, dp = draw(st.sampled_from(SIZES))
    cp = 2 if tp * pp * dp == 2 and draw(st.sampled_from([True, False, False])) else 1
    schedule, vpp = draw(st.sampled_from(PIPELINES)) if pp > 1 else ("1f1b", 1)
    more = {
        "sp": tp > 1 and draw(st.booleans()),
        "zero": draw(st.sampled_from([0, 1, 3])) if dp > 1 else 0,
        "recompute": draw(st.sampled_from(["none", "none", "full", "selective"])),
    }
    micro = draw(st.sampled_from([1, 2])) if SCHEDULES[schedule].allows(ROWS // dp // 2, pp) else 1
    made = replace(made, layers=max(made.layers, pp * vpp))
    return made, Plan(tp=tp, pp=pp, dp=dp, cp=cp, vpp=vpp, schedule=schedule, strict=False, **more), micro


class HandRms(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def norm(kind: str, size: int) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "by_hand": HandRms, "none": lambda _: nn.Identity()}[kind](size)


class InOut(nn.Module):
    """A linear map that keeps its weight as [in, out]."""

    def __init__(self, size: int, out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, out) * 0.3)
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.weight.shape[1])


class Attention(nn.Module):
    def __init__(self, a: Architecture):
        super().__init__()
        self.a, C, H, K, D = a, a.hidden, a.heads, a.kv_heads, a.head_size
        linear = InOut if a.qkv == "in_out" else nn.Linear
        if a.qkv in ("separate", "in_out"):
            self.q, self.k, self.v = (linear(C, n * D, a.bias) for n in (H, K, K))
        elif a.qkv == "q_and_kv":
            self.q, self.kv = nn.Linear(C, H * D, a.bias), nn.Linear(C, 2 * K * D, a.bias)
        else:
            self.qkv = nn.Linear(C, (H + 2 * K) * D, a.bias)
        self.o = linear(H * D, C, a.bias)
        if a.out == "gated":
            self.gate = nn.Linear(C, H * D, a.bias)
        self.out_norm = norm("rms", D if a.out == "head_normed" else H * D) if "normed" in a.out else None
        sizes = (H * D, K * D) if a.head_norm == "all_heads" else (D, D)
        kind = "rms" if a.head_norm == "all_heads" else a.head_norm
        self.q_norm, self.k_norm = (norm(kind, size) for size in sizes)
        self.register_buffer("mask", torch.ones(TOKENS + 2, TOKENS + 2, dtype=torch.bool).tril())
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, H + 1))
        if a.attend == "talking":
            self.talk = nn.Parameter(torch.eye(H) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        a, (B, T, _), D = self.a, x.shape, self.a.head_size
        q, k, v = self.heads(x)
        if a.head_norm == "all_heads":
            q, k = self.q_norm(q.reshape(B, T, -1)).view(q.shape), self.k_norm(k.reshape(B, T, -1)).view(k.shape)
        else:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        q, k = turn(q, a.rope), turn(k, a.rope)
        gqa = a.share == "gqa" and a.attend in ("sdpa", "mask", "window", "bidirectional")
        if a.kv_heads != a.heads and not gqa:
            more = a.heads // a.kv_heads
            if a.share == "expand":
                k, v = (z[:, :, None].expand(B, a.kv_heads, more, T, D).reshape(B, a.heads, T, D) for z in (k, v))
            else:
                k, v = (z.repeat_interleave(more, 1) for z in (k, v))
        y = self.attend(q, k, v, gqa and a.kv_heads != a.heads)
        if a.out == "head_normed":
            y = self.out_norm(y)
        if a.out == "einsum" and a.qkv != "in_out":
            weight = self.o.weight.view(-1, a.heads, D)
            return torch.einsum("bhtd,chd->btc", y, weight) + (self.o.bias if a.bias else 0)
        y = y.transpose(1, 2).reshape(B, T, -1)
        if a.out == "gated":
            y = y * torch.sigmoid(self.gate(x))
        if a.out == "normed":
            y = self.out_norm(y)
        return self.o(y)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H, D], [B, T, K, D], [B, T, K, D]"""
        a, (B, T, _), H, K, D = self.a, x.shape, self.a.heads, self.a.kv_heads, self.a.head_size
        if a.qkv in ("separate", "in_out"):
            return tuple(f(x).view(B, T, -1, D) for f in (self.q, self.k, self.v))
        if a.qkv == "q_and_kv":
            return self.q(x).view(B, T, H, D), *self.kv(x).view(B, T, 2, K, D).unbind(2)
        y = self.qkv(x)
        if a.qkv == "grouped" or K != H:
            parts = y.view(B, T, K, H // K + 2, D).split([H // K, 1, 1], 3)
            return tuple(part.reshape(B, T, -1, D) for part in parts)
        if a.qkv == "thirds":
            return tuple(z.view(B, T, H, D) for z in y.split(H * D, -1))
        if a.qkv == "stacked":
            return y.view(B, T, 3, H, D).unbind(2)
        return tuple(z.squeeze(3) for z in y.view(B, T, H, 3, D).chunk(3, 3))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        """[B, H, T, D] of all"""
        how, T, scale = self.a.attend, q.shape[2], self.a.head_size**-0.5
        mask = self.mask[:T, :T]
        if how == "window":
            mask = mask & ~self.mask[:T, :T].tril(-3)
        if how in ("sdpa", "bidirectional"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=how == "sdpa", enable_gqa=gqa)
        if how in ("mask", "window"):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        if how == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
            scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
            return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        scores = q @ k.mT * scale
        if how == "alibi":
            at = torch.arange(T, device=q.device)
            scores = scores + self.slopes.view(-1, 1, 1) * (at - at[:, None])
        if how == "capped":
            scores = 3 * torch.tanh(scores / 3)
        if how == "talking":
            scores = torch.einsum("bhij,hg->bgij", scores, self.talk)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def turn(x: Tensor, how: str) -> Tensor:
    """Rotary embedding of [B, H, T, D]."""
    T, D = x.shape[-2:]
    if how == "none":
        return x
    if how == "partial" and D > 2:
        return torch.cat([turn(x[..., : D // 2], "pairs"), x[..., D // 2 :]], -1)
    rates = 100.0 ** (-torch.arange(0, D, 2, device=x.device, dtype=x.dtype) / D)
    angles = torch.arange(T, device=x.device, dtype=x.dtype)[:, None] * rates
    if how == "complex":
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    if how == "pairs":
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()]
        return torch.stack(turned, -1).flatten(-2)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin


class Mlp(nn.Module):
    def __init__(self, a: Architecture):
        super().__init__()
        self.a, C, N = a, a.hidden, a.ffn
        two = a.mlp in ("fused", "interleaved", "glu")
        if a.mlp == "experts":
            self.router = nn.Linear(C, 3)
            self.up, self.down = nn.Parameter(torch.randn(3, C, N) * 0.3), nn.Parameter(torch.randn(3, N, C) * 0.3)
        elif a.mlp == "chain":
            self.maps = nn.Sequential(nn.Linear(C, N), nn.Linear(N, C), nn.Tanh(), nn.Linear(C, N), nn.Linear(N, C))
        else:
            self.fc1, self.fc2 = nn.Linear(C, 2 * N if two else N, a.bias), nn.Linear(N, C, a.bias)
        if a.mlp == "swiglu":
            self.gate = nn.Linear(C, N, a.bias)
        if a.mlp == "normed":
            self.norm = norm(a.norm, N)
        if a.mlp == "scaled":
            self.scale = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        how, N = self.a.mlp, self.a.ffn
        if how == "experts":
            hidden = F.silu(torch.einsum("btc,ecf->btef", x, self.up))
            return torch.einsum("btef,efc,bte->btc", hidden, self.down, self.router(x).softmax(-1))
        if how == "chain":
            return self.maps(x)
        h = self.fc1(x)
        if how == "fused":
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        elif how == "interleaved":
            h = h.view(*h.shape[:-1], N, 2)
            h = F.gelu(h[..., 0]) * h[..., 1]
        elif how == "glu":
            h = F.glu(h, -1)
        elif how == "swiglu":
            h = F.silu(self.gate(x)) * h
        elif how == "squared":
            h = F.relu(h).square()
        else:
            h = F.gelu(h, approximate="tanh")
        if how == "softmax":
            h = h.softmax(-1)
        elif how == "normed":
            h = self.norm(h)
        elif how == "read_twice":
            return self.fc2(h) + h.mean(-1, keepdim=True)
        elif how == "summed":
            h = h + h.sum(-1, keepdim=True) * 0.05
        elif how == "rolled":
            h = h + torch.roll(h, 1, -1)
        elif how == "scaled":
            h = h * self.scale
        elif how == "mirrored":
            return self.fc2(h) + F.linear(h, self.fc1.weight.t())
        if how == "einsum":
            return torch.einsum("btf,cf->btc", h, self.fc2.weight)
        return self.fc2(h)


class Block(nn.Module):
    def __init__(self, a: Architecture):
        super().__init__()
        self.a, self.attn, self.mlp = a, Attention(a), Mlp(a)
        self.norms = nn.ModuleList(norm(a.norm, a.hidden) for _ in range(4))
        self.scale = nn.Parameter(torch.full((a.hidden,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        attn, mlp, (one, two, three, four), how = self.attn, self.mlp, self.norms, self.a.block
        if how == "post":
            x = one(x + attn(x))
            return two(x + mlp(x))
        if how == "sandwich":
            x = x + three(attn(one(x)))
            return x + four(mlp(two(x)))
        if how == "parallel":
            return x + attn(one(x)) + mlp(two(x))
        if how == "one_norm":
            y = one(x)
            return x + attn(y) + mlp(y)
        if how == "scaled":
            x = x + self.scale * attn(one(x))
            return x + self.scale * mlp(two(x))
        x = x + attn(one(x))
        return x + mlp(two(x))


class Model(nn.Module):
    """Ids [B, T] and labels [B, T] to a loss: a mean over all labels, so that micro-batches count alike."""

    def __init__(self, a: Architecture):
        super().__init__()
        self.a = a
        self.wte = nn.Embedding(a.vocab, a.hidden)
        if a.positions == "learnt":
            self.wpe = nn.Embedding(TOKENS + 3, a.hidden)
        if a.positions == "segments":
            self.segments = nn.Parameter(torch.randn(2, a.hidden))
        self.h = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.ln_f = norm(a.norm, a.hidden)
        self.head = nn.Linear(a.hidden, a.vocab, bias=a.head_bias)
        if a.tied:
            self.head.weight = self.wte.weight
        for parameter in self.parameters():  # so that none can hide behind a zero or a one
            nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        a = self.a
        x = self.positions(self.wte(input_ids) * (a.hidden**0.5 if a.tied else 1.0))
        skipped, terms = [], []
        for i, block in enumerate(self.h):
            if a.extra == "reused_block" and i == len(self.h) - 1:
                block = self.h[0]
            if a.extra == "skip" and i >= (len(self.h) + 1) // 2:
                x = x + skipped.pop()
            skipped.append(x)
            x = reshaped(block, x, a.reshape)
            if a.extra == "hidden_loss":
                terms.append(x.tanh().square().mean() * 0.1)
        logits = self.head(self.ln_f(x))
        if a.extra == "capped":
            logits = 5 * torch.tanh(logits / 5)
        if a.extra == "z_loss":
            terms.append(logits.logsumexp(-1).square().mean() * 0.01)
        return sum(terms, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    def positions(self, x: Tensor) -> Tensor:
        T, C, how = x.shape[1], self.a.hidden, self.a.positions
        if how == "learnt":
            return x + self.wpe(torch.arange(T, device=x.device))
        if how == "sinusoids":
            rates = 50.0 ** (-torch.arange(0, C, 2, device=x.device, dtype=x.dtype) / C)
            angles = torch.arange(T, device=x.device, dtype=x.dtype)[:, None] * rates
            return x + torch.stack([angles.sin(), angles.cos()], -1).view(T, C)
        if how == "segments":
            return x + self.segments.repeat_interleave(T // 2, 0)
        return x


def reshaped(block: nn.Module, x: Tensor, how: str) -> Tensor:
    """A block on x [B, T, C], after detours that change nothing."""
    B, T, C = x.shape
    if how == "flat":
        return block(x.reshape(-1, C).view(B, T, C)).flatten(0, 1).unflatten(0, (B, -1))
    if how == "tokens_first":
        return block(x.transpose(0, 1).contiguous().transpose(0, 1)).permute(1, 0, 2).permute(1, 0, 2)
    if how == "split_hidden":
        return block(x.view(B, T, 2, C // 2).flatten(2)).view(B, T, C // 4, 4).reshape(B, T, -1)
    if how == "two_halves":
        return block(torch.cat(x.split([C // 2, C - C // 2], -1), -1))
    return block(x)
