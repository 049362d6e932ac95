"""Tiny plain-PyTorch models and datasets that many tests share. No parallel code in here.

Parameters are created in a fixed order: the reference numbers in `reference.py` belong to these models built after
`torch.manual_seed(1234)` in float32 and then widened to float64.
"""

import math
import os
import signal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCAB, BATCH, SEQ = 64, 8, 12


class BigBiasMLP(nn.Module):
    """Two Linears, the second with a bias so large that adding it twice cannot be missed."""

    def __init__(self, d: int = 8, h: int = 16, bias: float = 100.0):
        super().__init__()
        self.fc1 = nn.Linear(d, h)
        self.fc2 = nn.Linear(h, d)
        nn.init.constant_(self.fc2.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Attn(nn.Module):
    """Causal attention with separate q, k, v; `kv` heads of keys and values are shared by groups of queries."""

    def __init__(self, d: int, heads: int, kv: int | None = None, p: float = 0.0):
        super().__init__()
        self.heads, self.kv, self.head_dim, self.p = heads, kv or heads, d // heads, p
        self.q = nn.Linear(d, self.heads * self.head_dim)
        self.k = nn.Linear(d, self.kv * self.head_dim)
        self.v = nn.Linear(d, self.kv * self.head_dim)
        self.o = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape

        def heads_first(y: Tensor, heads: int) -> Tensor:
            return y.view(b, t, heads, self.head_dim).transpose(1, 2)

        q = heads_first(self.q(x), self.heads)
        k = heads_first(self.k(x), self.kv).repeat_interleave(self.heads // self.kv, 1)
        v = heads_first(self.v(x), self.kv).repeat_interleave(self.heads // self.kv, 1)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, kv: int | None = None, p: float = 0.0):
        super().__init__()
        self.n1 = nn.LayerNorm(d)
        self.attn = Attn(d, heads, kv, p)
        self.n2 = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.n1(x)))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.n2(x)))))


class TinyGPT(nn.Module):
    """Most tests' default: ids [B, T] to logits [B, T, vocab]."""

    def __init__(
        self,
        vocab: int = VOCAB,
        d: int = 16,
        layers: int = 4,
        heads: int = 4,
        kv: int | None = None,
        ctx: int = 32,
        tied: bool = True,
        p: float = 0.0,
    ):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(ctx, d)
        self.h = nn.ModuleList(Block(d, heads, kv, p) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class ZeroHeadGPT(TinyGPT):
    """All logits start at 0, so the first loss is exactly ln(vocab)."""

    def __init__(self, vocab: int = 101, **options):
        super().__init__(vocab=vocab, tied=False, **options)
        nn.init.zeros_(self.lm_head.weight)


class AssertNet(nn.Module):
    """The sanity checks on shapes and dtypes that people leave in their models."""

    def __init__(self, d: int = 16, vocab: int = VOCAB, ctx: int = 32):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(ctx, d)
        self.blk = Block(d, 4)
        self.head = nn.Linear(d, vocab)
        self.ctx, self.d = ctx, d

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.size()
        assert t <= self.ctx, f"sequence of {t} does not fit in {self.ctx}"
        assert ids.dim() == 2 and ids.dtype == torch.long
        if self.wte.weight.shape[0] < 10:
            raise ValueError("vocabulary too small")
        x = self.wte(ids) * math.sqrt(self.d) + self.wpe(torch.arange(0, t, device=ids.device))
        x = self.blk(x)
        assert x.shape == (b, t, self.d)
        return self.head(x)


class DictNet(nn.Module):
    """Keyword inputs with None defaults, a dict out, labels that are needed at the end only and shifted here."""

    def __init__(self, vocab: int = VOCAB, d: int = 16, layers: int = 4, heads: int = 4):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.h = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def forward(self, input_ids, attention_mask=None, labels=None, return_hidden=False):
        x = self.wte(input_ids)
        keep = None if attention_mask is None else attention_mask[..., None].to(x.dtype)
        for block in self.h:
            x = block(x)
            if keep is not None:
                x = x * keep
        logits = self.head(x)
        out = {"logits": logits}
        if labels is not None:
            predicted, following = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            out["loss"] = F.cross_entropy(predicted, following, ignore_index=-100)
        if return_hidden:
            out["hidden"] = x
        return out


class TokenWrap(nn.Module):
    """A float-in float-out core between an embedding and a head, so that it can be fed token ids."""

    def __init__(self, core: nn.Module, d: int, vocab: int = VOCAB):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.core = core
        self.head = nn.Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.core(self.emb(ids)))


class WrappedBigBias(TokenWrap):
    """TokenWrap around a BigBiasMLP, as one class that a config can name."""

    def __init__(self, bias: float = 1.0, d: int = 8):
        super().__init__(BigBiasMLP(d=d, bias=bias), d)


def fixed_batch(step: int, batch: int = BATCH, seq: int = SEQ, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """(ids, labels) of global batch `step`, each [batch, seq]; the labels are already shifted."""
    generator = torch.Generator().manual_seed(10_000 + step)
    tokens = torch.randint(0, vocab, (batch, seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class FixedRows(Dataset):
    """Read in order, global batch s is `fixed_batch(s)`: sample i is its row i % batch, of step i // batch."""

    def __init__(self, steps: int = 20, batch: int = BATCH, seq: int = SEQ, vocab: int = VOCAB):
        batches = [fixed_batch(step, batch, seq, vocab) for step in range(steps)]
        self.rows = [row for ids, labels in batches for row in zip(ids, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        ids, labels = self.rows[i]
        return {"input_ids": ids, "labels": labels, "sample_id": i}


class RandomRows(Dataset):
    """Rows drawn with torch's global generator: what a rank reads depends on that generator's state."""

    def __init__(self, n: int = 64, seq: int = SEQ, vocab: int = VOCAB):
        self.n, self.seq, self.vocab = n, seq, vocab

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict:
        tokens = torch.randint(0, self.vocab, (self.seq + 1,))
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "sample_id": i}


class CrashRows(FixedRows):
    """FixedRows that goes wrong on one rank from row `after` on. how: "raise", "exit" or "kill"."""

    def __init__(self, rank: int = 1, after: int = 16, how: str = "raise", **options):
        super().__init__(**options)
        self.rank, self.after, self.how = str(rank), after, how

    def __getitem__(self, i: int) -> dict:
        if os.environ.get("RANK") == self.rank and i >= self.after:
            if self.how == "raise":
                raise ValueError(f"planted failure on rank {self.rank} at row {i}")
            if self.how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class MaskedRows(Dataset):
    """DictNet's rows: the labels are the input ids (the model shifts them); the last `masked` tokens do not count."""

    def __init__(self, steps: int = 20, masked: int = 3):
        self.ids = torch.cat([fixed_batch(step)[0] for step in range(steps)])
        self.masked = masked

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        ids = self.ids[i]
        keep = torch.arange(len(ids)) < len(ids) - self.masked
        return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.masked_fill(~keep, -100)}
