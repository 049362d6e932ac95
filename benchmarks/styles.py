"""Small language models in the ways in which people write them: each differs in what happens between its Linears."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families import FFN, HEADS, HIDDEN, KV_HEADS, LAYERS, TOKENS, VOCAB, Batch, tokens
from meg_compile.models.loss import cross_entropy

WIDTH = HIDDEN // HEADS


def shifted(step: int) -> Batch:
    """As `tokens`, each label the token after its own, for a model that returns logits."""
    batch = tokens(step)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].roll(-1, 1)}


@dataclass(frozen=True)
class Style:
    """A model that returns logits, made of blocks of one kind."""

    block: Callable[[], nn.Module]
    positions: bool = True

    loss = staticmethod(cross_entropy)
    batch = staticmethod(shifted)

    def build(self) -> nn.Module:
        return Model(self.block, self.positions)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], positions: bool):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.wpe = nn.Embedding(TOKENS, HIDDEN) if positions else None
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Attention and feed-forward, each behind a norm and added to what comes in."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[int], nn.Module] = nn.LayerNorm):
        super().__init__()
        self.norm_1, self.attention = norm(HIDDEN), attention
        self.norm_2, self.mlp = norm(HIDDEN), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class FusedThirds(nn.Module):
    """nanoGPT: one Linear for q, k and v, cut in thirds, and the fused attention."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.c_attn(x).split(HIDDEN, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class MaskBuffer(nn.Module):
    """minGPT: three Linears, a triangle in a buffer, softmax by hand."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril().view(1, 1, TOKENS, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            linear(x).view(b, t, HEADS, c // HEADS).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = F.softmax(weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class GroupedFused(nn.Module):
    """litgpt: q, k and v of each group of heads beside each other in one Linear; rotary angles in halves."""

    def __init__(self):
        super().__init__()
        self.attn, self.proj = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH), nn.Linear(HIDDEN, HIDDEN)
        angles = torch.outer(torch.arange(TOKENS), 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        per_group = HEADS // KV_HEADS
        qkv = self.attn(x).view(b, t, KV_HEADS, per_group + 2, WIDTH).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        k = k.expand(b, KV_HEADS, per_group, t, WIDTH)
        v = v.expand(b, KV_HEADS, per_group, t, WIDTH)
        q, k, v = (part.reshape(b, -1, t, WIDTH) for part in (q, k, v))
        y = F.scaled_dot_product_attention(self.rotate(q, t), self.rotate(k, t), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))

    def rotate(self, x: Tensor, t: int) -> Tensor:
        first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return x * self.cos[:t] + torch.cat((-second, first), dim=-1) * self.sin[:t]


class RotaryPairs(nn.Module):
    """gpt-fast: one Linear for fewer kv heads, rotary angles on pairs, repeat_interleave, a boolean mask."""

    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("freqs", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = [HIDDEN, KV_HEADS * WIDTH, KV_HEADS * WIDTH]
        q, k, v = (part.view(b, t, -1, WIDTH) for part in self.wqkv(x).split(sizes, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (self.rotate(q), self.rotate(k), v))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal[None, None, :t, :t], dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, HIDDEN))

    def rotate(self, x: Tensor) -> Tensor:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        freqs = self.freqs[: x.size(1)].view(1, x.size(1), 1, pairs.size(3), 2)
        real, imaginary = pairs[..., 0], pairs[..., 1]
        turned = (
            real * freqs[..., 0] - imaginary * freqs[..., 1],
            imaginary * freqs[..., 0] + real * freqs[..., 1],
        )
        return torch.stack(turned, dim=-1).flatten(3)


class Torch(nn.Module):
    """nn.MultiheadAttention as self-attention with a causal mask."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device, dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's own layer; its attention sees every token."""

    def __init__(self):
        super().__init__(HIDDEN, HEADS, FFN, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN))


STYLES = {
    "nanoGPT style": Style(lambda: Residual(FusedThirds(), gelu_mlp())),
    "minGPT style": Style(lambda: Residual(MaskBuffer(), gelu_mlp())),
    "litgpt style": Style(lambda: Residual(GroupedFused(), SwiGlu(), nn.RMSNorm), positions=False),
    "gpt-fast style": Style(lambda: Residual(RotaryPairs(), SwiGlu(), nn.RMSNorm), positions=False),
    "nn.MultiheadAttention": Style(lambda: Residual(Torch(), gelu_mlp())),
    "nn.TransformerEncoderLayer": Style(EncoderLayer),
}
