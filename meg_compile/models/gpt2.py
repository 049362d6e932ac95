"""GPT-2 in plain PyTorch. It imports torch only and knows nothing of parallelism.

Parameter names are those of Hugging Face's GPT-2; weights are `nn.Linear`'s, so `[out, in]`.

Shapes: B batch, T tokens, V vocabulary, C hidden, H heads, D = C / H head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QKV_LAYOUTS = ("thirds", "stacked", "per_head")


class Attention(nn.Module):
    """Self-attention, causal or where a mask is true, with one fused projection to queries, keys and values.

    The 3C outputs of `c_attn` are read as q | k | v ("thirds"), as [3, H, D] ("stacked"; the same order of rows,
    written as one view) or as [H, 3, D] ("per_head"; q, k and v of each head lie side by side).
    """

    def __init__(self, hidden: int, heads: int, dropout: float, qkv_layout: str):
        super().__init__()
        self.heads, self.dropout, self.qkv_layout = heads, dropout, qkv_layout
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        B, T, C = x_BTC.shape
        H, D = self.heads, C // self.heads
        qkv = self.c_attn(x_BTC)  # [B, T, 3C]
        if self.qkv_layout == "thirds":
            q, k, v = (part.view(B, T, H, D) for part in qkv.split(C, dim=2))
        elif self.qkv_layout == "stacked":
            q, k, v = qkv.view(B, T, 3, H, D).unbind(2)
        else:
            q, k, v = qkv.view(B, T, H, 3, D).unbind(3)
        q_BHTD, k_BHTD, v_BHTD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout_p = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask_B1TT, dropout_p, mask_B1TT is None)
        y_BTC = y_BHTD.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y_BTC))


class MLP(nn.Module):
    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        h = F.gelu(self.c_fc(x_BTC), approximate="tanh")  # [B, T, 4C]
        return self.dropout(self.c_proj(h))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float, qkv_layout: str):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, dropout, qkv_layout)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, dropout)

    def forward(self, x_BTC: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), mask_B1TT)
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class GPT2(nn.Module):
    """Token ids [B, T] in, next-token logits [B, T, V] out.

    Rows of several documents may come with `document_ids` [B, T], one number for all tokens of a document: a token then
    sees only its own. `position_ids` [B, T] give its place there; without them it is that in the row.

    tied: the head is the token embedding's weight. Sizes that cannot work, and a sequence longer than `context`,
    are a ValueError.
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        context: int = 1024,
        layers: int = 12,
        hidden: int = 768,
        heads: int = 12,
        dropout: float = 0.0,
        tied: bool = True,
        qkv_layout: str = "thirds",
    ):
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden={hidden} does not divide into heads={heads}")
        if qkv_layout not in QKV_LAYOUTS:
            raise ValueError(f"qkv_layout={qkv_layout!r} is not one of {', '.join(QKV_LAYOUTS)}")
        self.context = context
        self.wte = nn.Embedding(vocab_size, hidden)
        self.wpe = nn.Embedding(context, hidden)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(hidden, heads, dropout, qkv_layout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's start: N(0, 0.02), the 2L projections into the residual stream N(0, 0.02 / sqrt(2L)), biases 0."""
        residual_std = 0.02 / math.sqrt(2 * max(len(self.h), 1))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, input_ids: Tensor, document_ids: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        T = input_ids.shape[1]
        if self.context < T:
            raise ValueError(f"a sequence of {T} tokens does not fit in the model's context of {self.context}")
        positions_T = torch.arange(T, device=input_ids.device)
        positions = positions_T if position_ids is None else position_ids
        mask_B1TT = None
        if document_ids is not None:
            same_document_BTT = document_ids[:, :, None] == document_ids[:, None, :]
            mask_B1TT = (same_document_BTT & (positions_T[:, None] >= positions_T)).unsqueeze(1)
        x_BTC = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x_BTC = block(x_BTC, mask_B1TT)
        return self.lm_head(self.ln_f(x_BTC))
