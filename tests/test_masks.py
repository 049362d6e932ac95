"""Constant masks of attention: recognised where a kernel has a word for them, left alone otherwise."""

import models
import pytest
import torch
import torch.nn.functional as F
from compare import Case, check
from torch import nn

from meg_compile.compiler import compile
from meg_compile.graph.nodes import base_name
from meg_compile.plan import Plan

T = models.SEQ


class MaskedAttention(nn.Module):
    """Attention of four heads with a mask that `make(self, T)` gives."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.emb, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(4, T, T))
        self.register_buffer("tril", torch.ones(2 * T, 2 * T, dtype=torch.bool).tril()[None, None], persistent=False)

    def forward(self, ids):
        x = self.emb(ids)
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, self.make(self, ids.shape[1]))
        return self.head(x + self.out(y.transpose(1, 2).flatten(-2)))


def additive(model, n):
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~model.tril[0, 0, :n, :n], -torch.inf)


def least(model, n):
    hidden = torch.arange(n)[None] > torch.arange(n)[:, None]
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)


MASKS = {  # name: (mask, what it becomes: is_causal, or None where it stays)
    "buffer": (lambda model, n: model.tril[:, :, :n, :n], True),
    "positions": (lambda model, n: torch.arange(n)[:, None] >= torch.arange(n), True),
    "additive": (additive, True),
    "least": (least, True),
    "open": (lambda model, n: torch.ones(1, n, dtype=torch.bool), False),
    "window": (lambda model, n: model.tril[0, 0, :n, :n].triu(-3), None),
    "reversed": (lambda model, n: ~model.tril[0, 0, :n, :n] | torch.eye(n, dtype=torch.bool), None),
    "learned": (lambda model, n: model.bias[:, :n, :n], None),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_recognised(name):
    make, becomes = MASKS[name]
    ids = torch.zeros(2, T, dtype=torch.long)
    program = compile(lambda: MaskedAttention(make), {"input_ids": ids, "labels": ids}, Plan(), dtype=torch.float64)
    (node,) = [n for n in program.captured.graph.nodes if base_name(n.target) == "scaled_dot_product_attention"]
    assert (node.args[3:] == (None, 0.0, becomes)) if becomes is not None else isinstance(node.args[3], torch.fx.Node)


@pytest.mark.parametrize("name", MASKS)
def test_models_train_as_the_plain_ones(name):
    case = Case(
        lambda: MaskedAttention(MASKS[name][0]),
        lambda step: dict(zip(("input_ids", "labels"), models.fixed_batch(step), strict=True)),
        ("emb.weight", "qkv.*", "out.weight", "head.*") + (("bias",) if name == "learned" else ()),
    )
    check(case, Plan(tp=2), 2)
