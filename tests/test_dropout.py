"""Exact dropout: the compiled run is the plain one with the same masks, under every plan."""

import pytest
import torch
import torch.nn.functional as F
from models import FixedRows
from test_recompute import WrittenOut
from torch import nn
from training import config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy
from meg_compile.ops.counted import exact_attention, keep_mask, row_keys
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.train.batches import batches_of
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
def test_training_is_the_plain_one_with_the_same_masks(factory, plan):
    changes = {f"plan__{key}": value for key, value in plan.items()}
    settings = config(train__micro_batch_size=1 if factory is gpt2 else 2, **changes)

    def work(program, executor, groups):
        assert len(program.draws) == (13 if factory is gpt2 else 4)
        return verify(settings, program, executor, groups, factory, cross_entropy, FixedRows(), steps=2)

    report = on_ranks(settings, work, factory)[0]
    assert report.ok, report.worst()
    assert "same masks" in report.title
    assert max(difference.error for difference in report.differences) < 1e-9


class Mixed(nn.Module):
    """Dropout of token positions (the same for all rows), of rows flattened with tokens, and inside MultiheadAttention,
    which flattens rows with heads."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(64, 16), nn.Parameter(torch.randn(12, 16))
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 64)

    def forward(self, ids):
        x = self.emb(ids) + F.dropout(self.pos, 0.3, self.training)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        hidden = F.dropout(F.gelu(self.up(x.flatten(0, 1))), 0.25, self.training)
        return self.head((x.flatten(0, 1) + self.down(hidden)).view(x.shape))


@pytest.mark.parametrize("plan", [{"tp": 2, "dp": 2}, {"tp": 4, "strict": False}, {"pp": 2}], ids=str)
def test_rows_and_positions_are_found_wherever_they_lie(plan):
    settings = config(**{f"plan__{key}": value for key, value in plan.items()})

    def work(program, executor, groups):
        return verify(settings, program, executor, groups, Mixed, cross_entropy, FixedRows(), steps=2)

    report = on_ranks(settings, work, Mixed)[0]
    assert report.ok, report.worst()
    assert "3 dropouts" in report.title


def test_masks_differ_by_row_step_site_seed_and_position():
    keys = row_keys(1, 5, [10, 11])
    places = [[(2, "batch")], [(64, "")], [(32, "")]]

    def mask(keys=keys, site=0):
        return keep_mask(keys, 0.25, site, places, True)

    right = mask()
    assert torch.equal(mask(), right)
    others = [mask(row_keys(2, 5, [10, 11])), mask(row_keys(1, 5, [12, 13])), mask(site=1), right.flip(0)]
    for other in [*others, right.flip(1), right.flip(2)]:
        # two independent masks agree in 0.75^2 + 0.25^2 of their 4096 entries, give or take 0.0076
        assert (other == right).float().mean().item() == pytest.approx(0.625, abs=0.04)
    assert right.float().mean().item() == pytest.approx(0.75, abs=0.03)
    shared = [keep_mask(row_keys(1, step, [3]), 0.25, 0, [[(64, "")]], False) for step in (5, 5, 6)]
    assert torch.equal(shared[0], shared[1]) and not torch.equal(shared[0], shared[2])


def test_attention_is_attention():
    q, k, v = (torch.randn(2, 4, n, 6, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(5, 7) > 0.5
    mask[2] = False
    nothing = (
        row_keys(0, 0, [0, 1]),
        0.0,
        0,
        [[(2, "batch")], [(4, "")], [(5, "")], [(7, "")]],
        True,
    )
    for given in ({"attn_mask": mask}, {"is_causal": True}, {"attn_mask": torch.randn(5, 7).double(), "scale": 0.3}):
        right = F.scaled_dot_product_attention(q, k, v, **given)
        options = (given.get("is_causal", False), given.get("scale"), False)
        torch.testing.assert_close(exact_attention(q, k, v, given.get("attn_mask"), *options, *nothing), right)
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    torch.testing.assert_close(exact_attention(q, k[:, :2], v[:, :2], None, False, None, True, *nothing), grouped)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + 0.1 * torch.randn_like(x))


def test_other_random_operators_are_refused():
    with pytest.raises(Refused, match=r"dropout=exact: randn_like \(test_dropout.py:\d+\).*dropout=fast"):
        on_ranks(config(), lambda *_: None, Noisy)
    on_ranks(config(dropout="fast"), lambda *_: None, Noisy)


@pytest.mark.parametrize("plan", [{}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("dropout", ["exact", "fast"])
def test_evaluation_drops_nothing(plan, dropout):
    """Compiled for evaluation, on the weights of the program that trains, it gives the loss of the model in eval()."""
    settings = config(dropout=dropout, **{f"plan__{key}": value for key, value in plan.items()})
    torch.manual_seed(settings.train.seed)
    model, batch = gpt2().double().eval(), batches_of(settings, FixedRows())[0]
    right = cross_entropy(model(batch["input_ids"]), batch["labels"]).item()
    example = {field: rows[:2] for field, rows in batch.items()}
    evaluation = compile(gpt2, example, settings.plan.plan(), dtype=torch.float64, dropout=dropout, training=False)

    def work(program, executor, groups):
        scale = 1 / program.count(batch)
        evaluator = Executor(evaluation, groups, executor.device, tensors=executor.tensors)
        losses = [evaluator.evaluate(batch, scale)]
        executor.run(program.keyed(batch, 0, 0, list(range(8))), scale)
        losses.append(evaluator.evaluate(batch, scale))
        assert all(p.grad is not None for p in executor.parameters.values())
        return losses if groups.coords.pp == settings.plan.pp - 1 else None

    for losses in filter(None, on_ranks(settings, work, gpt2)):
        assert losses == pytest.approx([right, right], rel=1e-12)


@pytest.mark.parametrize("rows", [1, 2])
def test_each_row_drops_its_own_weights_under_queries_that_all_share(rows):
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.embedding = nn.Parameter(torch.zeros(1, 4, 8)), nn.Embedding(8, 8)

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            return F.scaled_dot_product_attention(self.queries.expand(len(x), 4, 8), x, x, dropout_p=0.5)

    fields = {name: torch.zeros(rows, n, dtype=torch.long) for name, n in (("input_ids", 6), ("labels", 4))}
    [(_, of_rows)] = compile(Latents, fields, Plan()).draws
    assert of_rows
