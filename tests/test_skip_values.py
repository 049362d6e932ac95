"""Values that skip stages: of every dtype, read by several later stages, under every kind of schedule."""

import pytest
import torch
from compare import check, compile_case
from torch import nn
from zoo import case

from meg_compile.plan import Plan

VOCAB, HIDDEN, LAYERS = 30, 16, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Skips(nn.Module):
    """The first block's output gives a mask, indices, a float that no gradient goes through and one that it goes
    through; the second block's weights alone give a penalty. Blocks 2 and 3 read all of it, the loss reads the penalty.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.choices = nn.Embedding(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids, labels):
        x = first = self.h[0](self.embed(input_ids))
        keep, best, share = first > 0, first.argmax(-1), (first > 0.5).to(first.dtype).mean(-1, keepdim=True)
        x = self.h[1](x)
        penalty = self.h[1].norm.weight.square().mean()
        for block in self.h[2:]:
            x = block(x.masked_fill(keep, 0.5) + self.choices(best) + share * first)
        x = torch.where(keep, x, first)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / labels.numel() + penalty


def objective(model, batch):
    return model(batch["input_ids"], batch["labels"])


SHARDED = ("*.fc1.weight", "*.fc1.bias", "*.fc2.weight", "embed.weight", "choices.weight", "head.*")
SKIPS = case(Skips, *SHARDED, vocab=VOCAB, loss=None, objective=objective)
PLANS = [
    (Plan(pp=4), 1),
    (Plan(pp=4, schedule="gpipe"), 2),
    *(
        (Plan(pp=2, vpp=2, schedule=schedule), 1)
        for schedule in ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
    ),
    (Plan(tp=2, pp=2, vpp=2, schedule="zbv_zero_bubble"), 1),
]


@pytest.mark.parametrize(("plan", "size"), [pytest.param(*p, id=f"{p[0].schedule}-{p[0].num_stages}") for p in PLANS])
def test_values_that_skip_stages(plan, size):
    program = check(SKIPS, plan, size)
    dtypes = {value.dtype for stage in program.stages for value in stage.received}
    assert {torch.bool, torch.int64, torch.float64} <= dtypes


def test_only_what_has_a_gradient_sends_one_back():
    received = compile_case(SKIPS, Plan(pp=2), 1).stages[1].received
    kinds = sorted((str(value.dtype), value.shape[2:].numel(), value.requires_grad) for value in received)
    assert kinds == [
        ("torch.bool", HIDDEN, False),
        ("torch.float64", 1, False),  # the share of large entries
        ("torch.float64", HIDDEN, True),
        ("torch.float64", HIDDEN, True),
        ("torch.int64", 1, False),
    ]
