"""plan.keep, plan.shard and plan.place: what a person asks for is done, to the plain model's numbers, or refused."""

import pytest
from compare import check, compile_case
from zoo import ENDS, QKVO, ZOO, case, gpt2

from meg_compile.errors import Refused
from meg_compile.plan import Plan

BLOCK_1 = ("h.1.mlp.fc1.*", "h.1.mlp.fc2.weight")
INNER = ("*.maps.1.*", "*.maps.2.weight")  # of the chain of Linears; the compiler would take the axes beside it
VALUES = ("*.attn.v.*", "*.attn.o.weight")
EXPERTS = ("*.up", "*.down")


@pytest.mark.parametrize(
    ("name", "plan", "sharded"),
    [
        ("separate", Plan(tp=2, sp=True, keep=("h.0.mlp", "head.weight")), (*QKVO, *BLOCK_1, "wte.weight")),
        ("chain", Plan(tp=2, pp=2, shard=("h.*.mlp.maps.1.weight:0",)), (*QKVO, *INNER, *ENDS)),
        ("experts", Plan(tp=2, sp=True, shard=("v_head_dim",)), (*VALUES, *EXPERTS, *ENDS)),
        ("frozen", Plan(tp=2, shard=("wte",)), (*ZOO["frozen"].sharded, "wte.weight")),
        ("gpt2_thirds_tied", Plan(tp=3, keep=("heads", "ffn")), ("wte.weight",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_asked_for_is_done(name, plan, sharded):
    """The numbers are checked by `check`. In the last one tp divides neither of the axes that are kept."""
    check(ZOO[name], plan, 2, sharded)


def test_what_is_kept_says_why():
    text = compile_case(ZOO["separate"], Plan(tp=2, keep=("h.0.mlp.*",)), 2).explain()
    rows = [line for line in text.splitlines() if ".mlp.fc1 " in line and "whole" in line]
    assert len(rows) == 1 and "ffn: kept whole by plan.keep=h.0.mlp.*" in rows[0]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"keep": ("fnn", "h.0.mpl.*")}, ("plan.keep=fnn: matches", "did you mean ffn?", "did you mean h.0.mlp?")),
        ({"shard": ("h.*.mlp.c_fc.weight:2",)}, ("has 2 dims", "use h.*.mlp.c_fc.weight:1")),
        ({"shard": ("embed",)}, ("plan.shard=embed: ", "it is needed whole: layer_norm normalises over it (gpt2.py:",)),
        ({"shard": ("h.*.mlp.c_fc.weight:1",)}, ("c_fc.weight:1 and 1 more cannot", "use h.0.mlp.c_fc.weight:0")),
        ({"shard": ("wpe.weight:0",)}, ("no Linear produces or contracts it; leave it out",)),
        ({"shard": ("ffn",), "keep": ("h.1.mlp",)}, ("plan.shard=ffn: h.1.mlp.c_fc", "plan.keep=h.1.mlp; leave one",)),
        ({"shard": ("ffn",), "keep": ("ffn",)}, ("plan.shard=ffn: plan.keep=ffn keeps it whole; leave one",)),
        ({"shard": ("ffn",), "tp": 3, "strict": False}, ("plan.tp=3 does not divide 64; use a plan.tp that divides",)),
        ({"shard": ("ffn:x",)}, ("a pattern is a name, or a name with a dim behind a colon",)),
        ({"keep": ("heeds",), "tp": 1}, ("did you mean heads?",)),
    ],
    ids=lambda value: " ".join(f"{key}={what}" for key, what in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_is_refused(wishes, said):
    with pytest.raises(Refused) as caught:
        compile_case(case(gpt2(layers=2)), Plan(**{"tp": 2} | wishes), 2)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_sequence_is_not_kept_from_sp():
    with pytest.raises(Refused, match=r"plan.keep=seq: plan.sp=true shards the sequence"):
        compile_case(ZOO["separate"], Plan(tp=2, sp=True, keep=("seq",)), 2)


def test_two_wishes_for_one_tensor_are_refused():
    both = ("h.*.mlp.maps.0.weight:0", "h.0.mlp.maps.1.weight:0")
    with pytest.raises(
        Refused, match=r"of the same tensor is sharded instead, by plan.shard=h.*; leave one of the two"
    ):
        compile_case(ZOO["chain"], Plan(tp=2, shard=both), 2)


@pytest.mark.parametrize(
    ("place", "stages"),
    [
        ({"h.0": 0, "h.1": 1}, [1, 3]),
        ({"h.2": 0}, [3, 1]),
        ({"h.[01]": 0}, [2, 2]),
    ],
)
def test_blocks_lie_where_they_are_put(place, stages):
    program = compile_case(ZOO["gpt2_4"], Plan(pp=2, place=place), 2)
    assert [len(stage.layers) for stage in program.stages] == stages


def test_placed_blocks_train_as_the_plain_model():
    program = check(ZOO["gpt2_4"], Plan(tp=2, pp=2, place={"h.3": 1, "h.2": 0}), 2)
    assert [stage.layers for stage in program.stages] == [("h.0", "h.1", "h.2"), ("h.3",)]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"place": {"h.3": 0}}, "plan.place.h.3=0: h.3 is block 4 of 4, which 2 stages run in order.*; use stage 1"),
        ({"place": {"h.1": 1, "h.2": 0}}, r"plan.place.h.2=0: .* beside plan.place.h.1=1; use stage 1"),
        ({"place": {"h.1": 1, "h.[12]": 0}}, r"plan.place.h.1=1 puts h.1 on another stage; leave one of the two"),
        ({"place": {"h.11": 1}}, r"matches no block of the model; did you mean h.1\? The blocks are h.0 to h.3"),
        ({"place": {"h.1": 2}}, "there is no stage 2 of 2, counted from 0; use 0 to 1"),
        ({"place": {"h.1": 1}, "stages": (2, 2)}, r"plan.stages=\[2,2\] puts h.1 on stage 0"),
        ({"place": {"h.3": 0}, "stages": "Et*3|tL"}, r"plan.stages=Et\*3\|tL puts h.3 on stage 1"),
        ({"place": {"h.1": 2}, "pp": 3}, "use stage 0 or 1"),
    ],
)
def test_places_that_cannot_be_are_refused(plan, said):
    with pytest.raises(Refused, match=said):
        compile_case(ZOO["gpt2_4"], Plan(**{"pp": 2} | plan), 2)
