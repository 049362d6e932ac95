"""Layouts by hand: what their letters say, what is refused, and where blocks then lie."""

import json
from pathlib import Path

import pytest
from compare import check, compile_case
from zoo import GPT, ZOO, case, gpt2

from meg_compile.errors import Refused
from meg_compile.passes.partition import partition
from meg_compile.plan import Plan
from meg_compile.stage_layout import read_layout

MEGATRON = json.loads((Path(__file__).parent / "data" / "megatron_pipelines.json").read_text())


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Et|tL", ["Et", "tL"]),
        ("E,t*3 | t*2,L", ["Ettt", "ttL"]),
        ("Et*3|(tt|)*2,L", ["Ettt", "tt", "tt", "L"]),
        ("E|(t|(tt|)*2)*2L", ["E", "t", "tt", "tt", "t", "tt", "tt", "L"]),
        ("E|*3tL", ["E", "", "", "tL"]),
        ("E(t*2|)*2||L", ["Ett", "tt", "", "", "L"]),
    ],
)
def test_what_a_layout_says(text, stages):
    assert read_layout(text) == stages


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("t|EtL", ("must start with E",)),
        ("EEt|tL", ("must start with E",)),
        ("Et|Lt", ("must end with L",)),
        ("EtL|tL", ("must end with L",)),
        ("", ("must start with E",)),
        ("Et,m|L", ("multi-token prediction",)),
        ("Ex|L", ("'x'",)),
        ("E(t|tL", ("not closed",)),
        ("Et)|tL", ("not opened",)),
        ("*2E|L", ("* repeats nothing",)),
        ("Et*|L", ("* repeats nothing",)),
        ("Et|t|tL", ("3 stages", "pp=2 x vpp=1 = 2", "write 2")),
        ("Et|t|t|tL", ("4 stages", "plan.vpp=2")),
        ("Et|tL", ("2 blocks, and the model has 4", "Ett|ttL")),
        ("Et*4|t*3L", ("7 blocks, and the model has 4",)),
    ],
)
def test_layouts_that_cannot_be(layout, said):
    with pytest.raises(Refused) as caught:
        compile_case(ZOO["gpt2_4"], Plan(pp=2, stages=layout), 1)
    assert all(part in str(caught.value) for part in (f"plan.stages={layout}: ", *said))


def test_a_model_without_blocks_has_no_layout():
    with pytest.raises(Refused, match="no numbered blocks"):
        compile_case(ZOO["unnumbered"], Plan(pp=2, stages="Et|tL"), 1)


def plan_of(right):
    """The plan with Megatron's cut: its layout, or how many blocks each stage has."""
    pp, vpp = right["pp"], right["vpp"]
    schedule = "1f1b" if vpp == 1 else "interleaved_1f1b"
    return Plan(pp=pp, vpp=vpp, schedule=schedule, stages=right.get("layout", counts_of(right)))


def counts_of(right):
    return tuple(len(right["layers"][s % right["pp"]][s // right["pp"]]) for s in range(right["pp"] * right["vpp"]))


@pytest.fixture(scope="module")
def eight_blocks():
    return compile_case(case(gpt2(layers=8)), Plan(), 1).stages[0].graph


def test_blocks_lie_where_megatron_puts_them(eight_blocks):
    for right in MEGATRON["placements"]:
        plan = plan_of(right)
        if sum(len(stage) for rank in right["layers"] for stage in rank) == 8:
            stages = partition(eight_blocks, plan)
            layers = [[int(name[2:]) for name in stage.layers] for stage in stages]
            assert sum(stage.cost for stage in stages) == pytest.approx(partition(eight_blocks, Plan())[0].cost)
        else:
            counts = [s.count("t") for s in read_layout(right["layout"])] if "layout" in right else counts_of(right)
            layers = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]
        assert [[layers[s] for s in plan.stages_of(rank)] for rank in range(plan.pp)] == right["layers"]


@pytest.mark.parametrize("wrong", MEGATRON["refused"], ids=lambda wrong: wrong["layout"])
def test_what_megatron_refuses(wrong, eight_blocks):
    with pytest.raises(Refused, match=r"plan\.stages"):
        partition(eight_blocks, Plan(pp=wrong["pp"], stages=wrong["layout"]))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=3, stages="E|t*2|L"),
        Plan(tp=2, pp=2, vpp=2, schedule="zbv_zero_bubble", sp=True, stages="E|t*2||L"),
        Plan(pp=2, vpp=2, schedule="dualpipev", stages="E||t*2|L"),
        Plan(tp=2, pp=2, vpp=2, schedule="interleaved_1f1b", stages="Ett|||L"),
    ],
    ids=lambda plan: plan.schedule,
)
def test_stages_without_a_block(plan):
    program = check(case(gpt2(layers=2, vocab_size=30), *GPT, vocab=30), plan, 1)
    assert [len(stage.layers) for stage in program.stages] == [s.count("t") for s in read_layout(plan.stages)]
    assert "before the first" in program.explain() or program.stages[0].layers
