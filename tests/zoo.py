"""Small plain models that between them hold what people write in forward: the compiler must get each of them right.

Each entry of `ZOO` is a `Case`: a builder, its data, and which parameters tensor parallelism cuts in it. Two layers where
not said otherwise; sizes divide by 4. Every parameter is drawn at random, biases and norms too, so that one that is
added twice or read by the wrong rank cannot hide behind a zero.

B batch, T tokens, C hidden, H heads, D head size, F feed-forward size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compare import Batch, Case
from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy

ROWS, TOKENS, VOCAB, HIDDEN, HEADS, FFN = 4, 6, 32, 16, 4, 32


def tokens(step: int, vocab: int = VOCAB, ignored: int = 5) -> Batch:
    """Token ids and labels [ROWS, TOKENS]; `ignored` of the labels do not count, in uneven numbers per row."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels.view(-1)[torch.randperm(ROWS * TOKENS, generator=generator)[:ignored]] = -100
    labels[0, :3] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def stirred(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def case(make: Callable[[], nn.Module], *sharded: str, vocab: int = VOCAB, **options) -> Case:
    return Case(partial(stirred, make), options.pop("batch", partial(tokens, vocab=vocab)), sharded, **options)


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
    """Grouped kv heads in one projection: the q heads of a group, then its k and its v (as GPT-NeoX 20B's later kin)."""

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

    def __init__(self, sizes=(HIDDEN, 32, 24, 32, HIDDEN)):
        super().__init__()
        self.maps = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))

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


# Blocks and models


class Block(nn.Module):
    def __init__(self, attn: Callable[[], nn.Module] = Heads, mlp: Callable[[], nn.Module] = Mlp):
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = nn.LayerNorm(HIDDEN), attn(), nn.LayerNorm(HIDDEN), mlp()

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class ParallelBlock(Block):
    """One norm feeds attention and MLP (PaLM, Falcon): one f serves both."""

    def __init__(self, *args):
        super().__init__(*args)
        del self.n2

    def forward(self, x):
        y = self.n1(x)
        return x + self.attn(y) + self.mlp(y)


class ScaledBlock(Block):
    """Parameters that are used directly: a gain per channel, and one number per branch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gain, self.alpha = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = x + self.alpha * self.attn(self.n1(x))
        return x * self.gain + torch.sigmoid(self.alpha) * self.mlp(self.n2(x))


class Lm(nn.Module):
    """Token ids to logits [B, T, V] through numbered blocks."""

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        layers: int = 2,
        vocab: int = VOCAB,
        tied: bool = False,
        head_bias: bool = False,
        padding_idx: int | None = None,
        hidden: int = HIDDEN,
    ):
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden, padding_idx=padding_idx)
        self.pos = nn.Parameter(torch.randn(12, hidden))
        self.h = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=head_bias)
        if tied:
            self.head.weight = self.wte.weight

    def embed(self, input_ids):
        return self.wte(input_ids) + self.pos[: input_ids.shape[1]]

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        for block in self.h:
            x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))


class Capped(Lm):
    def forward(self, input_ids):
        logits = super().forward(input_ids) * HIDDEN**-0.5
        return 3.0 * torch.tanh(logits / 3.0)


class OwnLoss(Lm):
    """Returns a loss itself, in the shape that `kind` says, from labels that it shifts."""

    def __init__(self, kind: str, **options):
        super().__init__(**options)
        self.kind = kind

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        if self.kind == "dict":
            return {"logits": logits, "loss": loss, "none": None}
        if self.kind == "tuple":
            return loss, logits
        if self.kind == "dataclass":
            return Output(logits, loss)
        return loss


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch)
    if isinstance(out, dict):
        return out["loss"]
    return out[0] if isinstance(out, tuple) else getattr(out, "loss", out)


class TwoInputs(Lm):
    """A second field, by name, and a mask over keys that comes from the batch."""

    def __init__(self):
        super().__init__(block=Masked0)
        self.segments = nn.Embedding(4, HIDDEN)

    def forward(self, input_ids, segments, keep):
        x = self.embed(input_ids) + self.segments(segments)
        bias = (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e4
        for block in self.h:
            x = block(x, bias)
        return self.head(self.norm(x))


class Masked0(Block):
    def forward(self, x, bias):
        attn = self.attn
        y = self.n1(x)
        B, T, _ = y.shape
        q, k, v = (f(y).view(B, T, HEADS, -1).transpose(1, 2) for f in (attn.q, attn.k, attn.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + attn.o(y.transpose(1, 2).reshape(B, T, -1))
        return x + self.mlp(self.n2(x))


def two_inputs(step: int) -> Batch:
    batch = tokens(step)
    generator = torch.Generator().manual_seed(step)
    keep = torch.rand(ROWS, TOKENS, generator=generator) < 0.8
    keep[:, 0] = True
    return batch | {"segments": torch.randint(0, 4, (ROWS, TOKENS), generator=generator), "keep": keep.long()}


def two_inputs_loss(model, batch):
    return cross_entropy(model(batch["input_ids"], batch["segments"], batch["keep"]), batch["labels"])


class RelativeBias(Lm):
    """T5: one table of biases per head, looked up by distance, read by every layer."""

    def __init__(self, layers: int = 2):
        super().__init__(block=Masked0, layers=layers)
        self.table = nn.Embedding(2 * 12 - 1, HEADS)

    def forward(self, input_ids):
        x, T = self.embed(input_ids), input_ids.shape[1]
        at = torch.arange(T, device=x.device)
        distance = at[None, :] - at[:, None] + 11
        for block in self.h:
            x = block(x, self.table(distance).permute(2, 0, 1)[None])
        return self.head(self.norm(x))


class SharedBias(RelativeBias):
    """The same, looked up once before the layers: an activation that every layer reads."""

    def forward(self, input_ids):
        x, T = self.embed(input_ids), input_ids.shape[1]
        at = torch.arange(T, device=x.device)
        bias = self.table(at[None, :] - at[:, None] + 11).permute(2, 0, 1)[None]
        for block in self.h:
            x = block(x, bias)
        return self.head(self.norm(x))


class Twice(Lm):
    """Every block runs twice, the second time after all have run once: weights that two places use."""

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        for block in [*self.h, *self.h]:
            x = block(x)
        return self.norm(x)


class TwiceInPlace(Lm):
    def hidden(self, input_ids):
        x = self.embed(input_ids)
        for block in self.h:
            x = block(block(x))
        return self.norm(x)


class Frozen(Lm):
    """The embeddings, one weight inside a pair and a norm take no gradient."""

    def __init__(self):
        super().__init__()
        for parameter in (self.wte.weight, self.h[0].mlp.fc1.weight, self.h[1].n1.weight, self.h[1].attn.o.bias):
            parameter.requires_grad_(False)


class Unused(Lm):
    """A parameter that forward never reads."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(HIDDEN, HIDDEN)


class UNet(Lm):
    """Skips from the first blocks to the last: activations that pass by the stages between."""

    def hidden(self, input_ids):
        x, kept, half = self.embed(input_ids), [], len(self.h) // 2
        for block in self.h[:half]:
            x = block(x)
            kept.append(x)
        for block in self.h[half:]:
            x = block(x + 0.5 * kept.pop())
        return self.norm(x)


class StopGradient(Lm):
    """A value that is read again later without its gradient."""

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        first = x.detach()
        for block in self.h:
            x = block(x) + 0.1 * first
        return self.norm(x)


class ArgmaxRouted(Lm):
    """Integers and a comparison made from activations reach later layers."""

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        strongest = x.argmax(-1)
        for block in self.h:
            x = block(x) + 0.01 * strongest[..., None] + (strongest[..., None] > 7) * x
        return self.norm(x)


class Classified(Lm):
    """A learnt token in front, whose last hidden state is classified over few classes (ViT, BERT)."""

    def __init__(self, classes: int = 8):
        super().__init__(block=EncoderBlock)
        self.cls = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, input_ids):
        x = torch.cat([self.cls.expand(input_ids.shape[0], -1, -1), self.embed(input_ids)], dim=1)
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class EncoderBlock(Block):
    def __init__(self):
        super().__init__(attn=Bidirectional)


class Bidirectional(Heads):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def class_labels(step: int) -> Batch:
    return {"input_ids": tokens(step)["input_ids"], "labels": torch.arange(ROWS) * 3 % 8}


def class_loss(logits, labels):
    return F.cross_entropy(logits, labels)


def class_objective(model, batch):
    return class_loss(model(batch["input_ids"]), batch["labels"])


class ConvStem(nn.Module):
    """Images in: a convolution makes tokens, a mean over them is classified."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.h = nn.ModuleList(EncoderBlock() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, image):
        x = self.stem(image).flatten(2).transpose(1, 2)
        for block in self.h:
            x = block(x)
        return self.head(x.mean(1))


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"image": torch.randn(ROWS, 3, 8, 8, generator=generator).double(), "labels": torch.arange(ROWS) * 3 % 8}


class Encoder(nn.Module):
    """torch's own encoder layers: their MultiheadAttention packs q, k and v."""

    def __init__(self, norm_first: bool = False):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=norm_first)
            for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


class Regression(nn.Module):
    """No tokens and no numbered blocks; the loss is the model's own mean square."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Mlp(), Mlp(), Mlp()

    def forward(self, x, y):
        x = x + self.first(x)
        x = x + self.second(x)
        return F.mse_loss(x + self.third(x), y)


def vectors(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, HIDDEN, generator=generator).double()
    return {"x": x, "y": y}


class HandMse(Regression):
    def forward(self, x, y):
        out = torch.relu(self.first(x)) + self.second(x)
        return (self.third(out) - y).pow(2).sum(-1).mean()


class Unnumbered(nn.Module):
    """Blocks with names instead of numbers: cut where everything passes through one value."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN)
        self.low, self.middle, self.high = Block(), Block(), Block()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids):
        return self.head(self.high(self.middle(self.low(self.wte(input_ids)))))


class Constants(Lm):
    """Constants made in forward on the data's device, and one that lies on a module as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.shift = torch.linspace(0.0, 1.0, HIDDEN)

    def hidden(self, input_ids):
        x = self.embed(input_ids) + self.shift
        for i, block in enumerate(self.h):
            x = block(x) * torch.tensor([1.0, 0.5], device=x.device)[i] + torch.ones(HIDDEN, device=x.device)
        return self.norm(x)


class CpuConstants(Lm):
    """Constants made in forward with no device said, as people do who train on a CPU."""

    def hidden(self, input_ids):
        x = self.wte(input_ids) + self.pos[torch.arange(input_ids.shape[1])] + torch.linspace(0, 1, HIDDEN)
        for block in self.h:
            x = block(x) * torch.tensor(0.5)
        return self.norm(x)


class ExtraTerm(Lm):
    """A cross entropy inside a larger expression (z-loss): micro-batches weigh alike."""

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + 1e-2 * torch.logsumexp(logits, -1).square().mean()


class TwoHeads(Lm):
    """Two cross entropies, over vocabularies of different sizes."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(HIDDEN, 8)

    def forward(self, input_ids, labels=None):
        x = self.hidden(input_ids)
        first = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        second = F.cross_entropy(self.other(x).flatten(0, 1), labels.flatten() % 8)
        return first + 0.5 * second


def even_tokens(step: int) -> Batch:
    """Every label counts, so micro-batches count alike."""
    batch = tokens(step)
    return batch | {"labels": batch["input_ids"].flip(0)}


class SmoothedLoss(Lm):
    def forward(self, input_ids, labels=None):
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class SummedLoss(Lm):
    """Normalises by itself: a sum over the tokens, divided by a number that does not depend on them."""

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


class PerTokenLoss(Lm):
    def forward(self, input_ids, labels=None):
        losses = F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="none")
        return losses.mean()


class ChannelLoss(Lm):
    """Classes on the second of three dims, as torch's cross entropy allows."""

    def forward(self, input_ids, labels=None):
        return F.cross_entropy(super().forward(input_ids).transpose(1, 2), labels)


class LogProbLoss(Lm):
    """The loss by log-softmax and gather: the vocabulary stays whole."""

    def forward(self, input_ids, labels=None):
        log_probs = super().forward(input_ids).log_softmax(-1)
        return -log_probs.gather(-1, labels.clamp(min=0)[..., None]).mean()


def gpt2(**options) -> Callable[[], nn.Module]:
    return partial(GPT2, **{"vocab_size": VOCAB, "context": 12, "layers": 2, "hidden": HIDDEN, "heads": HEADS} | options)


def lm(attn=Heads, mlp=Mlp, block=Block, model=Lm, **options) -> Callable[[], nn.Module]:
    return partial(model, block=partial(block, attn, mlp), **options)


QKVO = ("*.attn.[qkv].weight", "*.attn.[qkv].bias", "*.attn.o.weight")
PAIR = ("*.fc1.weight", "*.fc1.bias", "*.fc2.weight")
ENDS = ("wte.weight", "head.weight")
ALL = (*QKVO, *PAIR, *ENDS)
GPT = ("*.c_attn.*", "*.c_proj.weight", "*.c_fc.*", "wte.weight")

ZOO: dict[str, Case] = {
    **{
        f"gpt2_{layout}_{'tied' if tied else 'untied'}": case(
            gpt2(tied=tied, qkv_layout=layout), *GPT, *(() if tied else ("lm_head.weight",))
        )
        for layout in ("thirds", "stacked", "per_head")
        for tied in (True, False)
    },
    # attention
    "separate": case(lm(), *ALL),
    "interleaved_kv": case(lm(partial(Interleaved, heads=8, kv=4)), *ALL),
    "expanded_kv": case(lm(partial(Expanded, heads=8, kv=4)), *ALL),
    "grouped_kv": case(lm(partial(Grouped, heads=8, kv=4)), *ALL),
    "fused_grouped_kv": case(lm(GroupedFused), "*.qkv.*", "*.o.weight", *PAIR, *ENDS),
    "masked": case(lm(Masked), *ALL),
    "einsum": case(lm(Einsum), *ALL),
    "rotary": case(lm(Rotary), *ALL),
    "rotary_grouped": case(lm(partial(type("RotaryGrouped", (Rotary, Grouped), {}), heads=8, kv=4)), *ALL),
    "norm_per_head": case(lm(NormedHeads), *ALL),
    "rms_per_head": case(lm(partial(NormedHeads, norm="rms")), *ALL),
    "hand_rms_per_head": case(lm(partial(NormedHeads, norm="by_hand")), *ALL),
    "alibi": case(lm(Alibi), *ALL),
    "sinks": case(lm(Sinks), *ALL, "*.attn.scale", "*.attn.sink"),
    "talking_heads": case(lm(TalkingHeads), "*.attn.v.*", "*.attn.o.weight", "*.talk", *PAIR, *ENDS),
    "gated": case(lm(Gated), "*.qkvg.*", "*.attn.o.weight", *PAIR, *ENDS),
    # feed-forward
    "swiglu": case(lm(mlp=SwiGlu), *QKVO, "*.gate.weight", "*.up.weight", "*.down.weight", *ENDS),
    "fused_swiglu": case(lm(mlp=FusedSwiGlu), *QKVO, "*.gate_up.*", "*.down.weight", *ENDS),
    "glu": case(lm(mlp=Glu), *QKVO, "*.gate_up.*", "*.down.weight", *ENDS),
    "lora": case(lm(mlp=Lora), *ALL, "*.b1.weight", "*.a2.weight"),
    "chain": case(lm(mlp=Chain), *QKVO, "*.maps.0.*", "*.maps.1.weight", "*.maps.2.*", "*.maps.3.weight", *ENDS),
    **{
        f"{kind}_in_pair": case(lm(mlp=partial(NormedFfn, kind)), *QKVO, *ENDS)
        for kind in "norm rms softmax max cumsum standardise flip sort pick sum".split()
    },
    "position_in_pair": case(lm(mlp=partial(NormedFfn, "position")), *ALL),
    "experts": case(lm(mlp=Experts), *QKVO, "*.up", "*.down", *ENDS),
    "function_of_weight": case(lm(mlp=Reweighted), *ALL, "*.scale"),
    "function_of_row": case(lm(mlp=partial(Reweighted, row=True)), *QKVO, *ENDS),
    "mirror": case(lm(mlp=Mirror), *QKVO, "*.mlp.weight", "*.b1", *ENDS),
    "in_place": case(lm(mlp=InPlace), *ALL),
    "dropless": case(lm(mlp=Dropless), *ALL),
    # blocks
    "parallel_block": case(lm(block=ParallelBlock), *ALL),
    "scaled_block": case(lm(block=ScaledBlock), *ALL),
    # whole models
    "tied": case(lm(tied=True), *QKVO, *PAIR, "wte.weight"),
    "head_bias": case(lm(head_bias=True), *ALL, "head.bias"),
    "capped": case(lm(model=Capped), *ALL),
    "padding_idx": case(lm(padding_idx=3), *ALL),
    "padding_idx_tied": case(lm(padding_idx=17, tied=True), *ALL),
    "vocab_101": case(lm(vocab=101), *ALL, vocab=101),
    "vocab_101_tied": case(lm(vocab=101, tied=True), *ALL, vocab=101),
    "vocab_5": case(lm(vocab=5, head_bias=True), *ALL, "head.bias", vocab=5),
    "vocab_5_tied": case(lm(vocab=5, tied=True), *ALL, vocab=5),
    **{
        f"own_loss_{kind}": case(lm(model=partial(OwnLoss, kind)), *ALL, objective=own_loss, loss=None)
        for kind in ("scalar", "dict", "tuple", "dataclass")
    },
    "two_inputs": case(TwoInputs, *ALL, "segments.weight", batch=two_inputs, objective=two_inputs_loss),
    "relative_bias": case(RelativeBias, *ALL, "table.weight"),
    "shared_relative_bias": case(SharedBias, *ALL, "table.weight"),
    "twice": case(lm(model=Twice), *ALL),
    "twice_in_place": case(lm(model=TwiceInPlace), *ALL),
    "frozen": case(Frozen, *QKVO, *PAIR, "head.weight"),
    "unused": case(Unused, *ALL),
    "stop_gradient": case(lm(model=StopGradient), *ALL),
    "argmax": case(lm(model=ArgmaxRouted), *ALL),
    "class_token": case(
        Classified, *QKVO, *PAIR, "wte.weight", "head.*", batch=class_labels, objective=class_objective, loss=class_loss
    ),
    "conv_stem": case(
        ConvStem,
        *(*QKVO, *PAIR, "head.*"),
        batch=images,
        objective=lambda model, batch: class_loss(model(batch["image"]), batch["labels"]),
        loss=class_loss,
    ),
    "encoder": case(Encoder, "*.in_proj_*", "*.out_proj.weight", "*.linear1.*", "*.linear2.weight", "wte.weight", "head.*"),
    "encoder_norm_first": case(
        partial(Encoder, norm_first=True),
        *("*.in_proj_*", "*.out_proj.weight", "*.linear1.*", "*.linear2.weight", "wte.weight", "head.*"),
    ),
    "regression": case(Regression, *PAIR, batch=vectors, objective=lambda m, b: m(**b), loss=None),
    "hand_mse": case(HandMse, *PAIR, batch=vectors, objective=lambda m, b: m(**b), loss=None),
    "unnumbered": case(Unnumbered, *ALL, "head.bias"),
    "constants": case(Constants, *ALL),
    "cpu_constants": case(CpuConstants, *ALL),
    "extra_term": case(lm(model=ExtraTerm), *QKVO, *PAIR, "wte.weight", batch=even_tokens, objective=own_loss, loss=None),
    "two_heads": case(TwoHeads, *ALL, "other.*", batch=even_tokens, objective=own_loss, loss=None),
    "smoothed": case(lm(model=SmoothedLoss), *QKVO, *PAIR, "wte.weight", batch=even_tokens, objective=own_loss, loss=None),
    "summed": case(lm(model=SummedLoss), *ALL, objective=own_loss, loss=None),
    "per_token": case(lm(model=PerTokenLoss), *ALL, objective=own_loss, loss=None),
    "channel_loss": case(lm(model=ChannelLoss), *QKVO, *PAIR, "wte.weight", objective=own_loss, loss=None),
    "log_prob_loss": case(lm(model=LogProbLoss), *QKVO, *PAIR, "wte.weight", objective=own_loss, loss=None),
    # four layers, for more stages
    "gpt2_4": case(gpt2(layers=4), *GPT),
    "gpt2_4_untied": case(gpt2(layers=4, tied=False, vocab_size=30), *GPT, "lm_head.weight", vocab=30),
    "u_net": case(lm(model=UNet, layers=4), *ALL),
    "stop_gradient_4": case(lm(model=StopGradient, layers=4), *ALL),
    "argmax_4": case(lm(model=ArgmaxRouted, layers=4), *ALL),
    "own_loss_4": case(lm(model=partial(OwnLoss, "dict"), layers=4, tied=True), *ALL, objective=own_loss, loss=None),
    "relative_bias_4": case(partial(RelativeBias, layers=4), *ALL, "table.weight"),
    "twice_4": case(lm(model=Twice, layers=4), *ALL),
}
