"""Sequence parallelism: the same training run, on parts of the sequence between g and f."""

import models
import pytest
import reference
import torch
from compare import check
from training import config, on_ranks
from zoo import ZOO

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.explain.traffic import collectives
from meg_compile.plan import Plan
from meg_compile.train.step import Trainer

NO_TOKENS = {"conv_stem", "hand_mse", "regression", "time_series"}
LN_F_WEIGHT_GRADIENT = 2.6376994236802296  # one rank's part alone is 1.3576, the mean of the parts 1.3188


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_trains_as_the_plain_one(name):
    plan = Plan(tp=2, sp=True)
    if name in NO_TOKENS:
        with pytest.raises(
            Refused, match=r"plan.sp=True: no sequence was found: no operator looks up tokens .*use plan.sp=false"
        ):
            check(ZOO[name], plan, 2)
    else:
        check(ZOO[name], plan, 2)


PLANS = [
    {"tp": 4},
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_losses_and_norms_are_those_of_the_plain_run(plan):
    settings = config(plan__sp=True, **{f"plan__{name}": value for name, value in plan.items()})

    def work(program, executor, groups):
        trainer = Trainer(settings, program, executor, groups, models.FixedRows())
        rows = []
        for step in range(5):
            gradients = trainer.gradients(step)
            trainer.update(step, gradients.norm)
            rows.append((gradients.loss, gradients.norm))
        return rows, {n: t.detach().clone() for n, t in executor.tensors.items() if not executor.specs[n].sharded}

    ranks = on_ranks(settings, work)
    for rows, _ in ranks:
        assert rows == [pytest.approx(expected, rel=1e-9) for expected in reference.TINY_GPT]
    for _, whole in ranks:  # copies of what is whole hold the same bits on every rank that has them
        for name, tensor in whole.items():
            assert all(torch.equal(tensor, other[name]) for _, other in ranks if name in other)


def test_gradients_of_norms_are_summed_over_their_parts_of_the_sequence():
    settings = config(plan__tp=2, plan__sp=True)

    def work(program, executor, groups):
        assert {"ln_f.weight", "h.0.n1.bias", "h.0.attn.o.bias", "h.0.fc2.bias", "wpe.weight"} <= {
            name for name, spec in program.params.items() if spec.partial
        }
        Trainer(settings, program, executor, groups, models.FixedRows()).gradients(0)
        return executor.parameters["ln_f.weight"].grad.norm().item()

    assert on_ranks(settings, work) == [pytest.approx(LN_F_WEIGHT_GRADIENT, rel=1e-9)] * 2


@pytest.mark.parametrize(
    ("length", "said"), [(11, "plan.tp=2 does not divide the sequence of 11"), (1, "no sequence was found")]
)
def test_a_length_that_tp_does_not_divide_is_refused(length, said):
    ids = torch.zeros(2, length, dtype=torch.long)
    with pytest.raises(Refused, match=f"plan.sp=True: {said}"):
        compile(models.TinyGPT, {"input_ids": ids, "labels": ids}, Plan(tp=2, sp=True))


class Shifted(models.TinyGPT):
    """Mixes each token with the one before it."""

    def forward(self, ids):
        return super().forward(torch.cat([ids[:, :1], ids[:, :-1]], 1))


class Restacked(models.TinyGPT):
    """Even positions first, then the odd ones."""

    def forward(self, ids):
        return super().forward(ids.view(len(ids), -1, 2).transpose(1, 2).reshape(len(ids), -1))


@pytest.mark.parametrize(("model", "said"), [(Shifted, "slice|cat"), (Restacked, "view|reshape")])
def test_what_breaks_a_sequence_is_named(model, said):
    ids = torch.zeros(2, 12, dtype=torch.long)
    with pytest.raises(Refused, match=rf"no sequence was found: ({said}) at test_sequence.py:\d+"):
        compile(model, {"input_ids": ids, "labels": ids}, Plan(tp=2, sp=True))


def test_the_bytes_are_those_of_the_all_reduces_they_replace():
    """A reduce-scatter and an all-gather of a value move what one all-reduce of it moves. Gathering again in backward,
    so that only parts are kept, comes on top."""
    ids = torch.zeros(2, 12, dtype=torch.long)

    def moved(sp):
        program = compile(models.TinyGPT, {"input_ids": ids, "labels": ids}, Plan(tp=2, sp=sp))
        found = [c for c in collectives(program) if c.group == "tp" and c.when != "step"]
        weight = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        again = [c.comm_bytes for c in found if c.what.endswith(" again")]
        assert len(again) == (9 if sp else 0), "before attention and the MLP of four layers, and before the head"
        return sum(weight[c.kind] * c.comm_bytes for c in found) - sum(again)

    assert moved(sp=True) == moved(sp=False)


def test_activations_between_stages_are_parts():
    ids = torch.zeros(2, 12, dtype=torch.long)
    program = compile(models.TinyGPT, {"input_ids": ids, "labels": ids}, Plan(tp=2, pp=2, sp=True))
    assert [tuple(value.shape) for value in program.stages[1].received] == [(2, 6, 16)]
