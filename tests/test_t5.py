"""The encoder-decoder model: under plans that cut it, with the decoder's start by hand and by cost."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compare import check, compile_case
from torch import nn
from zoo import ZOO, case, tokens

from meg_compile.errors import Refused
from meg_compile.models.t5 import T5, RelativeBias
from meg_compile.passes.layers import find_layers
from meg_compile.passes.partition import balance, partition
from meg_compile.plan import Plan
from meg_compile.train.data import TextHalves, TextRows

VOCAB = 32
SHARDED = ("shared.weight", "*_bias.table.weight", "*.[qkvo].weight", "*.wi.weight", "*.wo.weight")


def pairs(step):
    """The encoder reads 4 tokens, the decoder 6."""
    batch = tokens(step, VOCAB)
    return {
        "input_ids": tokens(step + 10, VOCAB)["input_ids"][:, :4].contiguous(),
        "decoder_input_ids": batch["input_ids"],
        "labels": batch["labels"],
    }


def objective(model, batch):
    logits = model(batch["input_ids"], batch["decoder_input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def t5(layers=2, **options):
    build = partial(T5, vocab_size=VOCAB, layers=layers, hidden=16, heads=4, **options)
    return case(build, *SHARDED, batch=pairs, objective=objective)


SMALL, LARGER = t5(), t5(3)


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (Plan(tp=2), 2),
        (Plan(tp=2, pp=2, sp=True, split=1), 1),
        (Plan(pp=4), 1),
        (Plan(tp=2, pp=2, vpp=2, schedule="zbv_zero_bubble", split=2), 1),
    ],
    ids=lambda value: f"{value.schedule}-{value.mesh.size}-{value.split}" if isinstance(value, Plan) else "",
)
def test_an_encoder_and_a_decoder(plan, size):
    check(SMALL, plan, size)


def test_a_block_of_the_encoder_may_be_placed_beside_the_decoder():
    """Left alone, the decoder starts on a stage of its own."""
    alone, placed = (compile_case(SMALL, Plan(pp=2, place=place), 1) for place in ({}, {"encoder.1": 1}))
    assert [len(stage.layers) for stage in alone.stages] == [2, 2]
    assert [len(stage.layers) for stage in placed.stages] == [1, 3]
    with pytest.raises(Refused, match=r"plan.split=1: plan.place=\{'encoder.1': 1\} puts a block of the other tower"):
        compile_case(SMALL, Plan(pp=2, split=1, place={"encoder.1": 1}), 1)


@pytest.fixture(scope="module")
def whole():
    return compile_case(LARGER, Plan(), 1).stages[0]


def cut(whole, **plan):
    return partition(whole.graph, Plan(**plan))


@pytest.mark.parametrize(("pp", "split"), [(2, 1), (3, 1), (3, 2), (4, 2), (4, 1), (4, 3)])
def test_the_decoder_starts_where_it_is_told_to(whole, pp, split):
    stages = cut(whole, pp=pp, split=split)
    towers = [{layer.partition(".")[0] for layer in stage.layers} for stage in stages]
    assert towers == [{"encoder"}] * split + [{"decoder"}] * (pp - split)
    assert sum(len(stage.layers) for stage in stages) == 6
    memory = (1, 4, 16)
    assert all(memory in {tuple(v.shape) for v in stage.received} for stage in stages[split:]), "all of them read it"
    assert "decoder_input_ids" not in [f for stage in stages[:split] for f in stage.fields], "embedded where it is read"


def test_both_halves_are_balanced(whole):
    costs = [layer.cost for layer in find_layers(whole.graph)]
    stages = cut(whole, pp=4, split=2)
    assert [len(stage.layers) for stage in stages] == balance(costs[:3], 2) + balance(costs[3:], 2)


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 6])
def test_without_a_split_the_decoder_starts_where_the_cost_says(whole, pp):
    stages = cut(whole, pp=pp)
    towers = [{layer.partition(".")[0] for layer in stage.layers} for stage in stages]
    assert all(len(tower) == 1 for tower in towers), "no stage holds blocks of both"
    possible = [cut(whole, pp=pp, split=s) for s in range(max(1, pp - 3), min(3, pp - 1) + 1)]
    cheapest = min(max(stage.cost for stage in other) for other in possible)
    assert max(stage.cost for stage in stages) == cheapest


def test_towers_that_follow_each_other_are_one_chain():
    """The second tower of a U-Net goes on from what the first one made: it may start in the middle of a stage."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
            self.before = nn.ModuleList(nn.Linear(16, 16) for _ in range(1))
            self.behind = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))

        def forward(self, ids):
            x = self.embed(ids)
            for layer in (*self.before, *self.behind):
                x = torch.tanh(layer(x))
            return self.head(x)

    program = compile_case(case(Chain, vocab=VOCAB), Plan(pp=2), 1)
    assert len(program.stages[0].layers) > 1


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"pp": 2, "split": 0}, ("plan.split=0", "use plan.split=1, or null")),
        ({"pp": 4, "split": 4}, ("plan.split=4", "4 stages", "use plan.split=1 to 3, or null")),
        ({"split": 1}, ("plan.split=1", "plan.pp=2")),
        ({"pp": 5, "split": 4}, ("3 blocks of encoder on 4 stages", "use plan.split=2 to 3, or null")),
        ({"pp": 4, "split": 2, "stages": (2, 2, 1, 1)}, ("plan.split=2", "plan.stages already says")),
    ],
)
def test_splits_that_cannot_be(whole, plan, said):
    with pytest.raises(Refused) as caught:
        cut(whole, **plan)
    assert all(part in str(caught.value) for part in said)


@pytest.mark.parametrize(("name", "has"), [("gpt2_4", "this one has h"), ("unnumbered", "this one has none")])
def test_a_model_of_one_tower_has_no_split(name, has):
    with pytest.raises(Refused, match=rf"plan\.split=1.*two towers.*{has}.*plan\.split=null"):
        compile_case(ZOO[name], Plan(pp=2, split=1), 1)


def test_rows_of_halves():
    rows, text = TextHalves(seq_len=8), TextRows(seq_len=8)
    row, window = rows[3], text[3]["input_ids"]
    assert row["input_ids"].tolist() == window[:4].tolist()
    assert row["labels"].tolist() == window[4:].tolist()
    assert row["decoder_input_ids"].tolist() == window[3:7].tolist(), "each label after the token before it"
    assert {name: len(tokens) for name, tokens in row.items()} == TextHalves.lengths(8)
    assert {name: len(tokens) for name, tokens in TextHalves(seq_len=9)[0].items()} == TextHalves.lengths(9)
    with pytest.raises(Refused, match=r"data\.seq_len"):
        TextHalves(seq_len=1)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="heads=3"):
        T5(hidden=16, heads=3)


def test_distances_fall_into_buckets_as_in_t5():
    """Near ones have a bucket each, far ones share it; the encoder's halves are behind and ahead."""
    causal, both = RelativeBias(1, causal=True), RelativeBias(1, causal=False)
    with torch.no_grad():
        for bias in (causal, both):
            bias.table.weight.copy_(torch.arange(32.0)[:, None])
    back = causal(200, torch.device("cpu"))[0, 0, -1].flip(0).tolist()
    assert back[:17] == list(range(17)) and back[127:] == [31] * 73 and sorted(back) == back
    row = both(200, torch.device("cpu"))[0, 0, 100].tolist()
    assert row[100:92:-1] == list(range(8)) and row[101:108] == list(range(17, 24))
