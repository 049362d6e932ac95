"""Exact dropout: the compiled run is the plain one with the same masks, under every plan."""

import pytest
import torch
from models import FixedRows
from test_recompute import WrittenOut
from training import config, on_ranks

from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy
from meg_compile.verify import verify


def gpt2():
    return GPT2(vocab_size=64, context=12, layers=4, hidden=16, heads=4, dropout=0.1)


def written_out():
    return WrittenOut(0.1)


@pytest.mark.parametrize("factory", [gpt2, written_out])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tp": 2},
        {"tp": 4, "sp": True},
        {"pp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "recompute": "full", "sp": True},
        {"tp": 2, "dp": 2, "recompute": "selective"},
    ],
    ids=str,
)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_training_is_the_plain_one_with_the_same_masks(factory, plan, micro_batch_size):
    changes = {f"plan__{key}": value for key, value in plan.items()}
    settings = config(train__micro_batch_size=micro_batch_size, **changes)

    def work(program, executor, groups):
        assert len(program.draws) == (13 if factory is gpt2 else 4)
        return verify(settings, program, executor, groups, factory, cross_entropy, FixedRows(), steps=2)

    report = on_ranks(settings, work, factory)[0]
    assert report.ok, report.worst()
    assert "same masks" in report.title
    assert max(difference.error for difference in report.differences) < 1e-9
