"""Collectives and the loss work in place only where nobody else reads the memory."""

import models
import torch
from compare import check
from torch import nn
from zoo import ENDS, QKVO, ZOO, case, lm

from meg_compile.compiler import compile
from meg_compile.ops.collectives import copy_to_tp, reduce_from_tp
from meg_compile.ops.vocabulary import vocab_cross_entropy
from meg_compile.plan import Plan


def owners(build, target):
    ids = torch.zeros(2, 12, dtype=torch.long)
    program = compile(build, {"input_ids": ids, "labels": ids}, Plan(tp=2))
    nodes = [n for stage in program.stages for n in stage.graph.nodes if n.target is target]
    return [n.kwargs.get("owned", False) for n in nodes]


def test_gpt_owns_all_that_it_reduces():
    assert all(owners(models.TinyGPT, reduce_from_tp)) and all(owners(models.TinyGPT, copy_to_tp))
    assert owners(models.TinyGPT, vocab_cross_entropy) == [True]


class ReadTwice(models.TinyGPT):
    """Its logits are capped: tanh keeps its result for backward, and the loss may not write over it."""

    def forward(self, ids):
        return torch.tanh(super().forward(ids) / 3) * 3


class SharedGradient(nn.Module):
    """The gradient of a sum reaches all that was added as one tensor: f may not write into it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.down(self.up(x) + (x * self.scale).mean(-1, keepdim=True))


def test_what_others_read_is_copied():
    assert owners(ReadTwice, vocab_cross_entropy) == [False]
    assert not all(owners(lm(mlp=SharedGradient), copy_to_tp))


def test_numbers_stay_right_where_memory_is_shared():
    sharded = (*QKVO, "*.up.weight", "*.up.bias", "*.down.weight", *ENDS)
    check(case(lm(mlp=SharedGradient), *sharded), Plan(tp=2), 2)
    check(ZOO["capped"], Plan(tp=2), 2)
