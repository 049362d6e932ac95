"""The plain model that every benchmark trains, and its data.

A GPT-2 with q, k, v and o as four Linears and an untied head. Shapes: B rows, T tokens, C hidden, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_SIZE = 64


@dataclass(frozen=True)
class Size:
    """`layers` blocks of width `hidden`, on rows of `seq` tokens out of `vocab`."""

    layers: int
    hidden: int
    seq: int = 256
    vocab: int = 8192

    @classmethod
    def parse(cls, text: str) -> Size:
        """ "4x256" -> 4 layers of width 256. ValueError for anything else."""
        layers, hidden = map(int, text.split("x"))
        if layers < 4 or hidden < 2 * HEAD_SIZE or hidden % (2 * HEAD_SIZE):
            raise ValueError(f"{text}: takes at least 4 layers, and a hidden size that {2 * HEAD_SIZE} divides")
        return cls(layers, hidden)

    def __str__(self) -> str:
        return f"{self.layers}x{self.hidden}"


class Attention(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (linear(x_BTC).view(B, T, -1, HEAD_SIZE).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTC)))


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(hidden), Attention(hidden)
        self.mlp_norm, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attn(self.attn_norm(x_BTC))
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class Embedding(nn.Module):
    def __init__(self, vocab: int, context: int, hidden: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(context, hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))


class GPT(nn.Module):
    """input_ids [B, T] -> logits [B, T, vocab]."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = Embedding(size.vocab, size.seq, size.hidden)
        self.blocks = nn.Sequential(*(Block(size.hidden) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(input_ids))))


def build(size: Size) -> GPT:
    """The same weights on every call and every rank."""
    torch.manual_seed(0)
    return GPT(size)


def batch(size: Size, rows: int, step: int) -> dict[str, Tensor]:
    """The rows [rows, T] of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(size.vocab, (rows, size.seq + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
