"""Blocks and whole models of the zoo; B batch, T tokens, C hidden, V vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_layers import FFN, HEADS, HIDDEN, TOKENS, Heads, Mlp

VOCAB = 32


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


class Mixer(nn.Module):
    """A pair over the axis of the tokens, then one over the channels (MLP-Mixer)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.channels = Mlp(TOKENS, 8), Mlp()

    def forward(self, x):
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x)


class SlotMixer(Mixer):
    """A softmax inside the pair over tokens leaves only the tokens' own axis to be cut."""

    def forward(self, x):
        slots = self.tokens.fc1(x.transpose(1, 2)).softmax(-1)
        x = x + self.tokens.fc2(slots).transpose(1, 2)
        return x + self.channels(x)


class MixerLm(Lm):
    """No positions, so that nothing but the batch itself says that the tokens' axis is no axis of the model."""

    def __init__(self, **options):
        super().__init__(**options)
        del self.pos

    def embed(self, input_ids):
        return self.wte(input_ids)


class TimeSeries(nn.Module):
    """Maps over time only, summed with learnt weights: parameters make and contract an axis of the batch itself."""

    def __init__(self, classes: int = 8):
        super().__init__()
        self.h = nn.ModuleList(Mlp(TOKENS, 5) for _ in range(2))
        self.pool = nn.Parameter(torch.ones(TOKENS))
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x):
        for mix in self.h:
            slots = mix.fc1(x.transpose(1, 2)).softmax(-1)
            x = x + mix.fc2(slots).transpose(1, 2)
        return self.head(torch.einsum("btc,t->bc", x, self.pool))


class DetachedTie(Lm):
    """The head reads the embedding's weight without a gradient of its own."""

    def forward(self, input_ids):
        return self.head(self.hidden(input_ids)) + F.linear(self.hidden(input_ids), self.wte.weight.detach())


class Picked(Lm):
    """Channels picked by a list of numbers, which becomes a constant of the graph."""

    def hidden(self, input_ids):
        x = super().hidden(input_ids)
        return x + x[..., [0, 3, 1, 2] * (HIDDEN // 4)]


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


class TwoInputs(Lm):
    """A second field, by name, and a mask over keys that comes from the batch."""

    def __init__(self):
        super().__init__(block=BiasedBlock)
        self.segments = nn.Embedding(4, HIDDEN)

    def forward(self, input_ids, segments, keep):
        x = self.embed(input_ids) + self.segments(segments)
        bias = (1.0 - keep[:, None, None, :].to(x.dtype)) * -1e4
        for block in self.h:
            x = block(x, bias)
        return self.head(self.norm(x))


class BiasedBlock(Block):
    def forward(self, x, bias):
        attn = self.attn
        y = self.n1(x)
        B, T, _ = y.shape
        q, k, v = (f(y).view(B, T, HEADS, -1).transpose(1, 2) for f in (attn.q, attn.k, attn.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + attn.o(y.transpose(1, 2).reshape(B, T, -1))
        return x + self.mlp(self.n2(x))


class RelativeBias(Lm):
    """T5: one table of biases per head, looked up by distance, read by every layer."""

    def __init__(self, layers: int = 2):
        super().__init__(block=BiasedBlock, layers=layers)
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


class TwiceEach(Lm):
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
