"""Context parallelism: the same training run, on parts of every sequence."""

import pytest
import torch
import torch.nn.functional as F
from compare import Case, check
from models import FixedRows
from torch import nn
from training import config, on_ranks
from zoo import ZOO

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy
from meg_compile.ops.group import Group, own_chunks
from meg_compile.plan import Plan
from meg_compile.verify import verify

UNDERSTOOD = """cpu_constants einsum_rms encoder experts frozen fused_grouped_kv gpt2_per_head_tied grouped_kv in_place
    lora padding_idx_tied position_in_pair relative_bias rotary_grouped shared_relative_bias u_net vocab_101""".split()
REFUSED = {
    "alibi": r"matmul \(zoo_layers.py:\d+\) relates positions to positions",
    "argmax": r"argmax \(zoo_models.py:\d+\) has no rule, so it is taken to need the whole sequence; add one",
    "class_token": r"select \(zoo_models.py:\d+\) needs the whole sequence",
    "conv_stem": "no sequence was found: no operator looks up tokens of the batch",
    "extra_term": "the loss is not a cross entropy over tokens",
    "mixer": r"linear \(zoo_layers.py:\d+\) needs the whole sequence",
    "own_loss_dict": r"slice \(zoo_models.py:\d+\) needs the whole sequence",
    "two_inputs": r"scaled_dot_product_attention \(.*\) takes a mask that depends on the data",
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_models_train_as_the_plain_one(name):
    check(ZOO[name], Plan(cp=3), 2, ())


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_sequence_is_refused(name):
    with pytest.raises(Refused, match=rf"plan.cp=3: {REFUSED[name]}.*use plan.cp=1"):
        check(ZOO[name], Plan(cp=3), 2, ())


@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2, "tp": 2, "sp": True},
        {"cp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "recompute": "selective"},
        {"cp": 2, "dp": 2, "recompute": "full"},
        {"cp": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_every_other_mesh_dim_and_dropout(plan, dropout):
    settings = config(**{f"plan__{key}": value for key, value in plan.items()})

    def factory():
        return GPT2(vocab_size=64, context=12, layers=4, hidden=16, heads=4, dropout=dropout)

    def work(program, executor, groups):
        return verify(settings, program, executor, groups, factory, cross_entropy, FixedRows(), steps=2)

    report = on_ranks(settings, work, factory)[0]
    assert report.ok, report.worst()
    assert max(difference.error for difference in report.differences) < 1e-9


def test_each_rank_has_an_early_and_a_late_chunk():
    parts = [own_chunks(torch.arange(12), 0, Group(3, rank)).tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_a_length_that_does_not_divide_is_refused():
    ids = torch.zeros(2, 10, dtype=torch.long)
    with pytest.raises(Refused, match=r"plan.cp=2: a sequence of 10 does not divide into 2 x 2 chunks; .* 4 divides"):
        compile(lambda: GPT2(64, 10, 2, 16, 4), {"input_ids": ids, "labels": ids}, Plan(cp=2))


class Fields(nn.Module):
    """Attends to itself, or causally to a source of another length.

    input_ids [rows, 2 x 8] are two sequences of 8 in one dim; kind [rows] is looked up too, though it is no sequence.
    """

    def __init__(self):
        super().__init__()
        self.emb, self.position, self.kinds = nn.Embedding(16, 8), nn.Embedding(8, 8), nn.Embedding(3, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, input_ids, kind, source=None):
        x = self.emb(input_ids.view(-1, 2, 8)) + self.position.weight + self.kinds(kind)[:, None, None]
        q, k, v = self.qkv(x).chunk(3, -1)
        if source is not None:
            k = v = self.emb(source)[:, None]
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True)).flatten(1, 2)


@pytest.mark.parametrize("length", [0, 4, 12])
def test_sequences_inside_a_dim_of_other_lengths_and_labels_of_rows(length):
    sizes = {"input_ids": (16, 4, 16), "labels": (16, 4, 16), "kind": (3, 4)}
    sizes |= {"source": (16, 4, length)} if length else {}

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randint(0, n, shape, generator=generator) for name, (n, *shape) in sizes.items()}

    def objective(model, batch):
        return cross_entropy(model(*(batch.get(name) for name in ("input_ids", "kind", "source"))), batch["labels"])

    check(Case(Fields, batch, (), objective), Plan(cp=2), 2)
