"""Random transformers under random plans: the numbers are those of the plain model, or the plan is refused.

ARCHITECTURES=2000 in the environment tries that many, other ones each time, in place of the same 200.
"""

import os
import random
from collections import Counter
from dataclasses import replace

import compare
import pytest
import torch
from architectures import ROWS, TOKENS, Architecture, compilations
from compare import Batch, Case
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from meg_compile.errors import Refused
from meg_compile.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")  # torch's, where a graph is functionalised

EXAMPLES = int(os.environ.get("ARCHITECTURES", 0))


def batch(a: Architecture, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, a.vocab, (ROWS, TOKENS + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def check(a: Architecture, plan: Plan, micro: int) -> str:
    """What became of it: "same", or the key that it was refused for."""
    case = Case(a.build, lambda step: batch(a, step), (), lambda model, rows: model(**rows), None, lr=1e-3)
    try:
        program = compare.compile_case(case, plan, micro)
    except Refused as error:
        return f"{error.faults[0].key}: {error.faults[0].problem}"
    run, held = compare.train(case, program)
    compare.assert_same(run, compare.plain.__wrapped__(case))
    compare.assert_copies_agree(program, held)
    return "same"


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 1800)
@pytest.mark.parametrize("first", range(8))
def test_random_architectures(first):
    found = Counter()

    @seed(random.randrange(2**32) if EXAMPLES else first)
    @settings(
        max_examples=(EXAMPLES or 200) // 8,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # each takes seconds: what fails is made smaller by hand
        suppress_health_check=list(HealthCheck),
    )
    @given(compilations())
    def one(made):
        what = check(*made)
        note(what)
        found[what] += 1

    one()
    assert found["same"] > 0.4 * found.total(), f"hardly anything is compiled: {found}"


PLAIN = Architecture(
    layers=2,
    hidden=12,
    heads=2,
    kv_heads=2,
    head_size=2,
    ffn=12,
    vocab=24,
    bias=False,
    qkv="separate",
    share="repeat",
    rope="none",
    head_norm="none",
    attend="sdpa",
    out="plain",
    mlp="plain",
    block="pre",
    norm="layer",
    positions="none",
    reshape="none",
    tied=False,
    head_bias=False,
    extra="none",
)


@pytest.mark.parametrize(
    ("made", "plan"),
    [
        # whole queries and keys beside shards of values: their gradients are partial sums
        (replace(PLAIN, kv_heads=1, rope="complex"), Plan(tp=2, strict=False)),
        # an empty value, reshaped
        (replace(PLAIN, rope="partial", head_size=4), Plan(dp=2)),
        # the pieces of a split on the far side of a stage's end
        (replace(PLAIN, layers=4, reshape="two_halves", extra="reused_block"), Plan(pp=4)),
    ],
    ids=["complex", "empty", "split"],
)
def test_what_was_wrong_once(made, plan):
    assert check(made, plan, 1) == "same"
