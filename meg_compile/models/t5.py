"""An encoder and a decoder after T5 (Raffel et al. 2020) in plain PyTorch. It imports torch only and knows nothing of
parallelism.

Shapes: B batch, S tokens of the encoder, T of the decoder, V vocabulary, C hidden, H heads, D = C / H head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BUCKETS, MAX_DISTANCE = 32, 128


class Attention(nn.Module):
    """Attention from x to `memory`, with a bias [1, H, to, from] on its scores."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x_BTC: Tensor, memory_BSC: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (self._split(y) for y in (self.q(x_BTC), self.k(memory_BSC), self.v(memory_BSC)))
        dropout_p = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p)
        return self.o(y_BHTD.transpose(1, 2).flatten(2))

    def _split(self, y: Tensor) -> Tensor:
        """[B, T, C] -> [B, H, T, D]."""
        B, T, C = y.shape
        return y.view(B, T, self.heads, C // self.heads).transpose(1, 2)


class MLP(nn.Module):
    """Feed-forward with the gelu of later T5s: it has no corner at which rounding could flip a gradient."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.wi = nn.Linear(hidden, 4 * hidden, bias=False)
        self.wo = nn.Linear(4 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.dropout(F.gelu(self.wi(x), approximate="tanh")))


class EncoderBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.norm_1, self.attn = nn.RMSNorm(hidden), Attention(hidden, heads, dropout)
        self.norm_2, self.mlp = nn.RMSNorm(hidden), MLP(hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSC: Tensor, bias_1HSS: Tensor) -> Tensor:
        y = self.norm_1(x_BSC)
        x_BSC = x_BSC + self.dropout(self.attn(y, y, bias_1HSS))
        return x_BSC + self.dropout(self.mlp(self.norm_2(x_BSC)))


class DecoderBlock(nn.Module):
    """Causal attention to itself, attention to what the encoder made, feed-forward."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.norm_1, self.attn = nn.RMSNorm(hidden), Attention(hidden, heads, dropout)
        self.norm_2, self.cross = nn.RMSNorm(hidden), Attention(hidden, heads, dropout)
        self.norm_3, self.mlp = nn.RMSNorm(hidden), MLP(hidden, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor, memory_BSC: Tensor, bias_1HTT: Tensor) -> Tensor:
        y = self.norm_1(x_BTC)
        x_BTC = x_BTC + self.dropout(self.attn(y, y, bias_1HTT))
        x_BTC = x_BTC + self.dropout(self.cross(self.norm_2(x_BTC), memory_BSC))
        return x_BTC + self.dropout(self.mlp(self.norm_3(x_BTC)))


class RelativeBias(nn.Module):
    """A learned bias per head on attention scores, by the distance of two positions, far ones in ever wider buckets."""

    def __init__(self, heads: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.table = nn.Embedding(NUM_BUCKETS, heads)

    def forward(self, T: int, device: torch.device) -> Tensor:
        """[1, H, T, T]; a causal one hides what comes later."""
        at = torch.arange(T, device=device)
        back_TT = at[:, None] - at[None, :]  # how far behind the key lies
        num = NUM_BUCKETS if self.causal else NUM_BUCKETS // 2
        ahead = 0 if self.causal else num * (back_TT < 0).long()
        distance = back_TT.clamp(min=0) if self.causal else back_TT.abs()
        exact = num // 2
        far = exact + (distance.clamp(min=1) / exact).log() / math.log(MAX_DISTANCE / exact) * (num - exact)
        bucket_TT = torch.where(distance < exact, distance, far.long().clamp(max=num - 1)) + ahead
        bias_1HTT = self.table(bucket_TT).permute(2, 0, 1)[None]
        return bias_1HTT.masked_fill(back_TT < 0, -math.inf) if self.causal else bias_1HTT


class T5(nn.Module):
    """Token ids [B, S] and the decoder's [B, T] in, next-token logits [B, T, V] for the decoder out.

    layers: of each of the two towers. tied: one table embeds both sides and is the head. Sizes that cannot work are a
    ValueError.
    """

    def __init__(
        self,
        vocab_size: int = 32128,
        layers: int = 6,
        hidden: int = 512,
        heads: int = 8,
        dropout: float = 0.0,
        tied: bool = True,
    ):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden={hidden} does not divide into heads={heads}")
        self.shared = nn.Embedding(vocab_size, hidden)
        self.encoder_bias = RelativeBias(heads, causal=False)
        self.encoder = nn.ModuleList(EncoderBlock(hidden, heads, dropout) for _ in range(layers))
        self.encoder_norm = nn.RMSNorm(hidden)
        self.decoder_bias = RelativeBias(heads, causal=True)
        self.decoder = nn.ModuleList(DecoderBlock(hidden, heads, dropout) for _ in range(layers))
        self.decoder_norm = nn.RMSNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.shared.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), the projections into a residual stream of n branches N(0, 0.02 / sqrt(n))."""
        branches = {"encoder": 2 * len(self.encoder), "decoder": 3 * len(self.decoder)}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith((".o.weight", ".wo.weight"))
                std = 0.02 / math.sqrt(max(branches[name.split(".")[0]], 1)) if into_stream else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        bias_1HSS = self.encoder_bias(input_ids.shape[1], input_ids.device)
        memory_BSC = self.dropout(self.shared(input_ids))
        for block in self.encoder:
            memory_BSC = block(memory_BSC, bias_1HSS)
        memory_BSC = self.dropout(self.encoder_norm(memory_BSC))
        bias_1HTT = self.decoder_bias(decoder_input_ids.shape[1], decoder_input_ids.device)
        x_BTC = self.dropout(self.shared(decoder_input_ids))
        for block in self.decoder:
            x_BTC = block(x_BTC, memory_BSC, bias_1HTT)
        return self.lm_head(self.dropout(self.decoder_norm(x_BTC)))
