"""Compiled programs train as the plain model does: loss, every gradient, norm and weights, in float64."""

from functools import partial

import pytest
import torch
from compare import check, compile_case, train
from torch import nn
from zoo import ALL, GPT, PAIR, ZOO, case, gpt2, lm, tokens
from zoo_layers import HEADS, Grouped, Heads
from zoo_models import ExtraTerm, Lm

from meg_compile.errors import MegError, Refused
from meg_compile.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")  # torch's, where a graph is functionalised

FOUR_LAYERS = [
    "gpt2_4",
    "gpt2_4_untied",
    "u_net",
    "stop_gradient_4",
    "argmax_4",
    "own_loss_4",
    "relative_bias_4",
    "twice_4",
]
TWO_LAYERS = [name for name in ZOO if name not in FOUR_LAYERS]
PLAIN_INSIDE = [name for name in TWO_LAYERS if not name.endswith("_in_pair")]

# Every model is cut four ways, and meets one of these besides.
OTHERS = [
    (Plan(tp=2, pp=2), 1),
    (Plan(tp=2, pp=2, schedule="gpipe"), 2),
    (Plan(tp=2, dp=2), 1),
    (Plan(pp=2), 2),
    (Plan(tp=2), 4),
]
PIPELINES = [
    (Plan(pp=3), 1),
    (Plan(pp=4), 1),
    (Plan(pp=2, vpp=2, schedule="interleaved_1f1b"), 1),
    (Plan(tp=2, pp=2, vpp=2, schedule="interleaved_1f1b"), 2),
    (Plan(pp=2, dp=2), 1),
    (Plan(tp=2, pp=4, schedule="gpipe"), 2),
]
WEAVE = [
    *((Plan(tp=tp, pp=pp, dp=dp), 1) for tp in (1, 2) for pp in (1, 2) for dp in (1, 2)),
    *((Plan(pp=2, schedule=schedule), size) for schedule in ("1f1b", "gpipe") for size in (1, 2)),
    *((Plan(), size) for size in (2, 4)),
    (Plan(tp=2, pp=2, stages=(1, 3)), 1),
    (Plan(pp=2, schedule="gpipe"), 4),
]


def name(plan: Plan) -> str:
    sizes = [f"{dim}{getattr(plan, dim)}" for dim in ("tp", "pp", "vpp", "dp") if getattr(plan, dim) > 1]
    return "-".join(sizes or ["one"]) + ("-gpipe" if plan.schedule == "gpipe" else "") + ("-cut" if plan.stages else "")


def named(cases):
    return [pytest.param(*c, id=f"{name(c[-2])}-mb{c[-1]}") for c in cases]


@pytest.mark.parametrize("model", TWO_LAYERS)
def test_four_ways(model):
    check(ZOO[model], Plan(tp=4), 2)


@pytest.mark.parametrize(
    ("model", "plan", "size"),
    [
        pytest.param(model, *OTHERS[i % len(OTHERS)], id=f"{model}-{name(OTHERS[i % len(OTHERS)][0])}")
        for i, model in enumerate(PLAIN_INSIDE)
    ],
)
def test_other_plans(model, plan, size):
    check(ZOO[model], plan, size)


@pytest.mark.parametrize(
    ("model", "plan", "size"),
    [
        pytest.param(model, *plan, id=f"{model}-{name(plan[0])}")
        for i, model in enumerate(FOUR_LAYERS)
        for plan in (PIPELINES[i % len(PIPELINES)], PIPELINES[(i + 2) % len(PIPELINES)])
    ],
)
def test_pipelines(model, plan, size):
    program = check(ZOO[model], plan, size)
    assert len(program.stages) == plan.num_stages


@pytest.mark.parametrize(("plan", "size"), named(WEAVE))
def test_every_kind_of_plan(plan, size):
    check(ZOO["gpt2_4"], plan, size)


# Tied weights lie on the first stage and the last.


@pytest.mark.parametrize(
    "plan", [Plan(pp=2, dp=2), Plan(tp=2, pp=2), Plan(pp=2, vpp=2, schedule="interleaved_1f1b")], ids=name
)
def test_a_tied_weight_has_a_copy_on_both_ends(plan):
    program = check(case(gpt2(layers=4, vocab_size=30), *GPT, vocab=30), plan, 1)
    assert program.params["wte.weight"].stages == (0, plan.num_stages - 1)
    assert program.params["wte.weight"].aliases == ("lm_head.weight",)


# Axes that tp does not divide


class SixHeads(nn.Module):
    """Six heads, and a feed-forward that four ranks can share."""

    def __init__(self):
        super().__init__()
        self.attn = Heads(heads=6, hidden=24)
        self.fc1, self.fc2 = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.fc2(torch.tanh(self.fc1(x)))


def six_heads(**options):
    return case(partial(Lm, block=SixHeads, hidden=24, vocab=30), *ALL, vocab=30, **options)


def test_six_heads_on_two_ranks():
    check(six_heads(), Plan(tp=2), 1)


def test_six_heads_on_four_ranks_stay_whole_where_that_is_allowed():
    check(six_heads(), Plan(tp=4, strict=False), 2, (*PAIR, "wte.weight", "head.weight"))


def test_six_heads_on_four_ranks_are_refused_with_what_works():
    with pytest.raises(Refused) as caught:
        compile_case(six_heads(), Plan(tp=4), 1)
    text = str(caught.value)
    assert "plan.tp=4" in text and "6 heads" in text and "1, 2, 3 or 6" in text and "plan.strict=false" in text


def test_a_refusal_names_every_axis_that_does_not_divide():
    class Odd(SixHeads):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(24, 33), nn.Linear(33, 24)

    with pytest.raises(Refused) as caught:
        compile_case(case(partial(Lm, block=Odd, hidden=24, vocab=30), vocab=30), Plan(tp=5), 1)
    faults = [str(fault) for fault in caught.value.faults]
    assert len(faults) == 2 and any("6 heads" in f for f in faults) and any("33 " in f for f in faults)


def test_fewer_kv_heads_than_ranks():
    grouped = case(lm(partial(Grouped, heads=HEADS, kv=2)), *ALL)
    check(grouped, Plan(tp=2), 1)
    check(grouped, Plan(tp=4, strict=False), 1, (*PAIR, "wte.weight", "head.weight"))
    with pytest.raises(Refused, match="does not divide the 2 "):
        compile_case(grouped, Plan(tp=4), 1)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab", [5, 101])
def test_padding_of_a_vocabulary_is_zero_and_stays_zero(vocab, tied, tp):
    """The numbers are compared in `check`; here what the last ranks hold behind their real rows."""
    model = case(lm(vocab=vocab, tied=tied), vocab=vocab)
    program = compile_case(model, Plan(tp=tp), 2)
    spec = program.params["wte.weight"]
    assert spec.local_shape[0] == -(-vocab // tp)
    _, held = train(model, program)
    for coords, tensors in held:
        real = min(max(vocab - coords.tp * spec.local_shape[0], 0), spec.local_shape[0])
        assert not tensors["wte.weight"][real:].any()


# Tokens that count


def whole_rows_ignored(step):
    """All labels of three of the rows are ignored, so some micro-batches and one replica have none."""
    batch = tokens(step)
    batch["labels"][1:] = -100
    batch["labels"][0, 3:] = 7
    return batch


@pytest.mark.parametrize(
    ("plan", "size"), named([(Plan(tp=2, pp=2), 1), (Plan(dp=2, tp=2), 1), (Plan(dp=4), 1), (Plan(), 4)])
)
def test_micro_batches_and_replicas_without_a_counted_label(plan, size):
    check(case(lm(tied=True), *(*ALL[:-1],), batch=whole_rows_ignored), plan, size)


def test_micro_batches_that_count_differently_are_refused_where_a_mean_of_means_is_wrong():
    model = case(lm(model=ExtraTerm), loss=None)
    program = compile_case(model, Plan(), 1)
    with pytest.raises(MegError, match=r"train\.micro_batch_size"):
        program.count(tokens(0))
    assert compile_case(model, Plan(), 4).count(tokens(0)) == 1
