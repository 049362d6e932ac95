"""Cutting a graph into stages: balance, order, refusals, what crosses a cut."""

import itertools
import random

import pytest
import torch
from compare import Case, check, compile_case
from torch import fx, nn
from zoo import ZOO, case, gpt2

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.passes.layers import find_activations, find_layers
from meg_compile.passes.partition import balance
from meg_compile.plan import Plan


def program_of(name="gpt2_4", **plan):
    return compile_case(ZOO[name], Plan(**plan), 1)


@pytest.mark.parametrize("seed", range(30))
def test_balance_against_every_cut(seed):
    draw = random.Random(seed)
    costs = [draw.choice([1.0, 2.0, 3.0, draw.random() * 10]) for _ in range(draw.randrange(2, 10))]
    num_stages = draw.randrange(1, min(len(costs), 5) + 1)
    counts = balance(costs, num_stages)
    assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == num_stages

    def loads(cuts):
        edges = [0, *cuts, len(costs)]
        return [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]

    every = [loads(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)]
    mine = loads(list(itertools.accumulate(counts))[:-1])
    assert max(mine) == pytest.approx(min(map(max, every)))
    squares = min(sum(x * x for x in load) for load in every if max(load) <= min(map(max, every)) + 1e-9)
    assert sum(x * x for x in mine) <= squares * (1 + 1e-9) or max(mine) < min(map(max, every)) + 1e-9


def test_a_model_of_one_block_is_one_layer():
    program = compile_case(case(gpt2(layers=1)), Plan(), 1)
    assert program.stages[0].layers == ("h.0",)
    with pytest.raises(Refused, match="use at most 1"):
        compile_case(case(gpt2(layers=1)), Plan(pp=2), 1)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_equal_layers_are_shared_out_evenly(num_stages):
    assert sorted(balance([1.0] * 12, num_stages)) == [12 // num_stages] * num_stages


@pytest.mark.parametrize("plan", [{"pp": 2}, {"pp": 3}, {"pp": 4}, {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}])
def test_every_layer_lies_on_one_stage_in_order(plan):
    program = program_of(**plan)
    assert [layer for stage in program.stages for layer in stage.layers] == [f"h.{i}" for i in range(4)]
    assert [stage.index for stage in program.stages] == list(range(program.plan.num_stages))


def test_every_activation_is_computed_once():
    whole, cut = program_of(), program_of(pp=4)
    names = [node.name for stage in cut.stages for node in find_activations(stage.graph)]
    assert sorted(names) == sorted(node.name for node in find_activations(whole.stages[0].graph))


def test_what_comes_before_the_first_block_belongs_to_it():
    """The embedding is computed, and paid for, with the first block."""
    first, *rest = find_layers(program_of().stages[0].graph)
    assert first.name == "h.0" and "embedding" in {node.name for node in first.nodes}
    assert not any(node.name == "embedding" for layer in rest for node in layer.nodes)


def test_what_comes_after_the_last_block_belongs_to_it():
    *_, last = find_layers(program_of().stages[0].graph)
    assert last.name == "h.3" and "cross_entropy_loss" in {node.name for node in last.nodes}


def test_costs_add_up_to_the_whole():
    whole = program_of().stages[0].cost
    assert sum(stage.cost for stage in program_of(pp=4).stages) == pytest.approx(whole, rel=1e-9)


def test_the_head_is_paid_for():
    """With a large vocabulary the last stage gets fewer blocks."""
    program = compile_case(case(gpt2(layers=6, vocab_size=2048), vocab=32), Plan(pp=2), 1)
    assert len(program.stages[1].layers) < len(program.stages[0].layers)


def test_stages_of_ranks_are_interleaved():
    program = program_of(pp=2, vpp=2, schedule="interleaved_1f1b")
    assert [program.stage_of_rank(r) for r in (0, 1)] == [[0, 2], [1, 3]]
    assert [program.pp_rank_of(s) for s in range(4)] == [0, 1, 0, 1]


def test_a_cut_by_hand():
    program = program_of(pp=2, stages=(1, 3))
    assert [len(stage.layers) for stage in program.stages] == [1, 3]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"pp": 5}, ("plan.pp=5", "4 layers", "at most 4")),
        ({"pp": 3, "vpp": 2, "schedule": "interleaved_1f1b"}, ("plan.pp x plan.vpp=6", "4 layers", "at most 4")),
        ({"pp": 2, "stages": (1, 2)}, ("plan.stages=", "1, 2", "4 layers", "2, 2")),
        ({"pp": 2, "stages": (4, 0)}, ("plan.stages=", "4, 0", "at least one layer", "2, 2")),
        ({"pp": 2, "stages": (2, 2, 2)}, ("plan.stages=", "3 stages", "2")),
        ({"pp": 2, "stages": (5, -1)}, ("plan.stages=", "less than 0")),
    ],
    ids=str,
)
def test_cuts_that_cannot_work_are_refused_with_what_would(plan, said):
    with pytest.raises(Refused) as caught:
        program_of(**plan)
    for part in said:
        assert part in str(caught.value)


def test_a_model_without_numbered_blocks_is_cut_where_all_passes_through_one_value():
    program = program_of("unnumbered", pp=3)
    assert all(len(stage.received) == (0 if i == 0 else 1) for i, stage in enumerate(program.stages))


def test_parameters_lie_where_they_are_read():
    program = program_of("gpt2_4", pp=4, stages=(1, 1, 1, 1))
    for i in range(4):
        assert program.params[f"h.{i}.mlp.c_fc.weight"].stages == (i,)
    assert program.params["wte.weight"].stages == (0, 3)
    assert program.params["wpe.weight"].stages == (0,) and program.params["ln_f.weight"].stages == (3,)


def test_a_parameter_that_nobody_reads_is_kept_by_the_first_stage():
    program = program_of("unused", pp=2)
    assert program.params["spare.weight"].stages == (0,)


def test_one_activation_crosses_between_blocks():
    for stage in program_of(pp=4).stages[1:]:
        assert [tuple(v.shape) for v in stage.received] == [(1, 6, 16)]


def test_skips_are_passed_along_by_the_stages_between():
    program = program_of("u_net", pp=4, stages=(1, 1, 1, 1))
    assert [len(stage.received) for stage in program.stages] == [0, 1, 2, 1], "the last sum is made before its block"
    assert all(len(a.sent) == len(b.received) for a, b in itertools.pairwise(program.stages))


def test_fields_go_to_the_stages_that_read_them():
    program = program_of(pp=4)
    assert [stage.fields for stage in program.stages] == [("input_ids",), (), (), ("labels",)]
    program = program_of("two_inputs", pp=2)
    assert set(program.stages[0].fields) == {"input_ids", "segments", "keep"}
    assert set(program.stages[1].fields) == {"keep", "labels"}, "the mask is made again rather than sent"


def test_positions_and_masks_are_made_again_rather_than_sent():
    program = program_of("masked", pp=2)
    assert [tuple(v.shape) for v in program.stages[1].received] == [(1, 6, 16)]
    assert "h.1.attn.mask" in program.stages[1].params


def test_stage_graphs_are_sound():
    for name in ("gpt2_4", "u_net", "relative_bias_4", "argmax_4"):
        for stage in program_of(name, pp=4).stages:
            stage.graph.lint()
            assert isinstance(stage.graph, fx.Graph)
            used = {n.target for n in stage.graph.nodes if n.op == "get_attr"}
            assert set(stage.params) <= used
            assert all(isinstance(v, torch.Tensor) for v in (*stage.received, *stage.sent))


@pytest.mark.parametrize("name", ["u_net", "shared_relative_bias", "stop_gradient", "argmax"])
def test_values_that_many_stages_read(name):
    check(ZOO[name], Plan(pp=2), 1)


def test_random_numbers_are_drawn_once():
    """A noise that enters before the first block, and is the target behind the last."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            noise = torch.randn_like(x)
            y = x + noise
            for layer in self.h:
                y = y + layer(y).relu()
            return (y - noise).square().mean()

    program = compile(Denoiser, {"x": torch.zeros(2, 8)}, Plan(pp=2), None, dropout="fast")
    draws = [node for stage in program.stages for node in stage.graph.nodes if "randn" in str(node.target)]
    assert len(draws) == 1
    assert len(program.stages[0].sent) == 2


def test_a_cut_between_partial_sums_and_their_sum():
    """The stage behind it may not sum in place: what it receives is a leaf of its graph."""

    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randint(0, 16, (4, 8), generator=generator) for name in ("input_ids", "labels")}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    num_layers = len(find_layers(compile_case(Case(Model, batch, ()), Plan(tp=2), 2).stages[0].graph))
    check(Case(Model, batch, ("embedding.weight", "head.*")), Plan(tp=2, pp=2, stages=(1, num_layers - 1)), 2)
