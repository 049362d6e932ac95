"""What is told of a program: how each Linear runs and why, and how much of the model runs in parallel."""

import pytest
from compare import compile_case
from zoo import TOKENS, ZOO, case, gpt2

from meg_compile.plan import Plan

BATCH, LAYERS, HIDDEN, VOCAB = 2, 2, 16, 32  # of gpt2()
PRODUCTS = BATCH * TOKENS * (LAYERS * 24 * HIDDEN**2 + 2 * VOCAB * HIDDEN)
ATTENTION = LAYERS * BATCH * 4 * TOKENS**2 * HIDDEN


@pytest.mark.parametrize(
    "plan", [Plan(tp=2), Plan(tp=2, sp=True), Plan(tp=2, pp=2, recompute="full")], ids=lambda plan: str(plan)
)
def test_all_of_gpt2_runs_in_parallel(plan):
    """Counted as published: 24 h^2 a token and block for the products, 4 t h for attention, 2 v h for the head."""
    flops = compile_case(case(gpt2(layers=LAYERS)), plan, BATCH).parallel_flops()
    assert flops == (PRODUCTS + ATTENTION, PRODUCTS + ATTENTION) and flops.share == 1


def test_one_rank_runs_nothing_in_parallel():
    flops = compile_case(case(gpt2(layers=LAYERS)), Plan(pp=2), BATCH).parallel_flops()
    assert flops == (0, PRODUCTS + ATTENTION) and flops.share == 0


def test_what_stays_whole_is_told_with_its_reason_and_its_share():
    """A patch convolution of 3 x 4 x 4 into 16 channels at 4 places is all that stays whole."""
    program = compile_case(ZOO["conv_stem"], Plan(tp=2), BATCH)
    flops, rows = program.parallel_flops(), program.to_dict()["linears"]
    assert flops.total - flops.parallel == BATCH * 4 * 2 * 3 * 4 * 4 * 16
    (stem,) = (row for row in rows if row["role"] == "whole")
    assert stem["module"] == "stem" and stem["flops"] == flops.total - flops.parallel
    assert "layer_norm normalises over it (zoo_models.py:" in stem["why"]
    assert "3, 4: conv2d convolves over it (zoo_models.py:" in stem["why"] and stem["source"].startswith("zoo_models")
    text = program.explain()
    assert f"run in parallel over tp ({flops.share:.1%})" in text
    assert program.to_dict()["flops"] == {"parallel": flops.parallel, "total": flops.total, "share": flops.share}


def test_equal_blocks_are_told_once():
    text = compile_case(ZOO["experts"], Plan(tp=2), BATCH).explain()
    gate = [line for line in text.splitlines() if " h.*.mlp.gate " in line]
    assert len(gate) == 1 and "softmax runs along it (zoo_layers.py:" in gate[0] and gate[0].split()[-2] == "2"
