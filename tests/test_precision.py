"""Half precision: what is rounded and what is not, loss scaling, and numbers that are none."""

import json
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import models
import pytest
import torch
from safetensors.torch import load_file
from test_train import logged, run_train
from test_verify import SETTINGS, NoSum, run_verify
from torch import nn
from training import config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import MegError
from meg_compile.plan import Plan
from meg_compile.train.batches import batches_of
from meg_compile.train.scale import LossScale
from meg_compile.train.step import Trainer

STEPS = 20


def settings_of(precision, steps=STEPS, micro=2, clip=1.0, lr=1e-2, name="adamw", **plan):
    changes = {"train__steps": steps, "train__micro_batch_size": micro, "train__clip_grad": clip}
    changes |= {"optim__lr": lr, "optim__name": name} | {f"plan__{key}": value for key, value in plan.items()}
    return config(precision=precision, **changes)


TIED, UNTIED = (partial(models.TinyGPT, layers=2, tied=tied) for tied in (True, False))


def trained(settings, factory: Callable[[], nn.Module] = TIED):
    """(losses, whole weights at the end)."""

    def work(program, executor, groups):
        trainer = Trainer(settings, program, executor, groups, models.FixedRows())
        losses = []
        for step in range(settings.train.steps):
            gradients = trainer.gradients(step)
            trainer.update(step, gradients.norm)
            losses.append(gradients.loss)
        return torch.tensor(losses), dict(executor.gather("value"))

    return on_ranks(settings, work, factory)[0]


@pytest.fixture(scope="module")
def fp32_losses():
    return trained(settings_of("fp32"))[0]


@pytest.mark.parametrize(
    ("precision", "plan"),
    [("bf16", {"tp": 2, "sp": True}), ("bf16", {"pp": 2, "dp": 2}), ("fp16", {"tp": 2, "pp": 2})],
    ids=str,
)
def test_losses_stay_near_those_of_float32(precision, plan, fp32_losses):
    """A loss of 5 to 11 comes out of logits that carry 8 (11) bits; seen: 1.6e-3 (3e-4). A wrong run parts by 0.1."""
    losses, _ = trained(settings_of(precision, **plan))
    assert ((losses - fp32_losses) / fp32_losses).abs().max() < {"bf16": 4e-3, "fp16": 1e-3}[precision]
    assert not torch.equal(losses, fp32_losses)


@pytest.fixture(scope="module")
def bf16_weights():
    """Two micro-batches, and nothing tied: every gradient is a sum of two."""
    return trained(settings_of("bf16", steps=3, micro=4, clip=0.0), partial(UNTIED, layers=4))[1]


@pytest.mark.parametrize(
    "plan", [{"pp": 2}, {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, {"recompute": "full"}, {"dp": 2}], ids=str
)
def test_plans_that_round_alike_are_equal_to_the_bit(plan, bf16_weights):
    """The sum of two is over micro-batches or over replicas."""
    _, weights = trained(settings_of("bf16", steps=3, micro=4, clip=0.0, **plan), partial(UNTIED, layers=4))
    assert all(torch.equal(weights[name], right) for name, right in bf16_weights.items())


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_gradients_of_micro_batches_are_summed_in_float32(plan):
    settings = settings_of("bf16", micro=1, **plan)

    def work(program, executor, groups):
        batch = batches_of(settings, models.FixedRows())[0]
        executor.run(batch, 1.0)
        together = {name: p.grad for name, p in executor.parameters.items()}
        sums: dict[str, torch.Tensor] = {}
        for row in range(0, 8, 2):  # a pipeline of two needs two micro-batches
            for p in executor.parameters.values():
                p.grad = None
            executor.run({name: rows[row : row + 2] for name, rows in batch.items()}, 1.0)
            sums = {name: sums.get(name, 0) + p.grad for name, p in executor.parameters.items()}
        return together, sums

    for together, sums in on_ranks(settings, work, TIED):
        for name, grad in together.items():
            assert grad.dtype == torch.float32
            # Sums of 8 float32 numbers in two orders; in bf16 they would be off by 4e-3.
            torch.testing.assert_close(grad, sums[name], rtol=1e-5, atol=1e-5 * grad.abs().max().item())


def test_masters_move_by_less_than_bfloat16_resolves():
    _, start = trained(settings_of("bf16", steps=0))
    _, moved = trained(settings_of("bf16", steps=3, lr=1e-6, name="sgd"))
    name = "h.1.fc1.weight"
    assert start[name].dtype == torch.float32 and not torch.equal(moved[name], start[name])
    same = moved[name].bfloat16() == start[name].bfloat16()
    assert same.double().mean() > 0.98  # 1e-6 of 0.1 is 1/400 of a step between two bfloat16 numbers


@pytest.mark.parametrize(
    ("precision", "plan"),
    [("bf16", {"tp": 2, "pp": 2, "sp": True}), ("bf16", {"dp": 2}), ("fp16", {"tp": 2}), ("fp16", {"pp": 2})],
    ids=str,
)
def test_verify_passes(precision, plan):
    settings = config(precision=precision, **{f"plan__{key}": value for key, value in plan.items()}, **SETTINGS)
    report, _ = run_verify(settings, TIED, steps=2)
    assert report.ok, report.worst()
    if "tp" not in plan:  # the loss is a float32 sum on both sides
        assert report.to_dict()["largest_error"]["loss"] < 1e-6
    if "dp" in plan:  # nor is anything else rounded otherwise
        assert report.to_dict()["largest_error"]["gradient"] < 1e-6


def test_verify_catches_a_fault():
    report, _ = run_verify(config(plan__dp=2, precision="bf16", **SETTINGS), TIED, executor_class=NoSum, steps=1)
    assert not report.ok


def test_the_masters_are_exported(tmp_path):
    path = tmp_path / "weights.safetensors"
    settings = config(train__steps=0, train__seed=7, export__path=str(path), precision="bf16", plan__tp=2)
    run_train(settings, tmp_path)
    torch.manual_seed(7)
    start = models.TinyGPT().state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in load_file(path).items())


def test_what_is_explained():
    ids = torch.zeros(2, 12, dtype=torch.long)
    program = compile(models.TinyGPT, {"input_ids": ids, "labels": ids}, Plan(dp=2), dtype=torch.bfloat16)
    plain = program.to_dict()
    assert (plain["params"]["ln_f.bias"]["dtype"], plain["params"]["ln_f.bias"]["held"]) == ("bfloat16", "float32")
    reduced = sum(c["comm_bytes"] for c in plain["collectives"] if c["group"] == "dp")
    assert reduced == 4 * 14688
    assert sum(map(program.weight_bytes, program.params.values())) == 6 * 14688


# ------------------------------------------------------------------------------------------------ loss scaling


def test_the_loss_scale_moves_as_megatrons():
    scale = LossScale()
    for overflow in (True, True, True):
        scale.update(overflow)
    assert scale.value == 2.0**14  # the first overflow is forgiven
    for _ in range(1000):
        scale.update(False)
    assert scale.value == 2.0**15
    scale.update(True)
    assert scale.value == 2.0**15  # and so is one after it grew
    fixed = LossScale(8.0)
    fixed.update(False)
    assert (fixed.value, fixed.may_fall) == (8.0, False)


@pytest.mark.parametrize("plan", [{}, {"pp": 2, "dp": 2}], ids=str)
def test_steps_that_overflow_are_skipped(tmp_path, capsys, plan):
    settings = config(
        precision="fp16", train__steps=6, optim__warmup_steps=3, **{f"plan__{k}": v for k, v in plan.items()}
    )
    with patch("meg_compile.train.scale.START", 2.0**19):
        result = run_train(settings, tmp_path)
    records = logged(tmp_path)
    assert [record["skipped"] for record in records] == [1, 2, 3, 3, 3, 3]
    assert [record["loss_scale"] for record in records] == [2.0**19, 2.0**19, 2.0**18] + [2.0**17] * 3
    assert [record["grad_norm"] is None for record in records] == [True] * 3 + [False] * 3
    assert [record["lr"] for record in records] == pytest.approx([0.1 / 3] * 4 + [0.2 / 3, 0.1])
    assert result["skipped_steps"] == 3 and json.loads(json.dumps(result, allow_nan=False)) == result
    assert "grad_norm overflow, skipped" in capsys.readouterr().out


def test_a_fixed_loss_scale_that_overflows_stops_the_run(tmp_path):
    settings = config(precision="fp16", train__loss_scale=2.0**30)
    with pytest.raises(
        MegError, match=r"step 1: the gradient norm is (nan|inf) at a loss scale of 1.07374e\+09, first in"
    ):
        run_train(settings, tmp_path)


# ------------------------------------------------------------------------------------------------ inf and nan


class Infinite(models.TinyGPT):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.get_parameter("h.2.fc1.bias"), torch.inf)


class Cusp(models.TinyGPT):
    """Its loss is finite; the square root's slope at 0 is not."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(16))

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for i, block in enumerate(self.h):
            x = block(x + self.gate.abs().sqrt() if i == 2 else x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize(
    ("plan", "stage"),
    [
        ({"tp": 2}, "stage 0 (pipeline rank 0)"),
        ({"dp": 2, "zero": 3}, "stage 0 (pipeline rank 0)"),
        ({"pp": 2, "dp": 2}, "stage 1 (pipeline rank 1)"),
        ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "recompute": "full"}, "stage 2 (pipeline rank 0)"),
    ],
    ids=str,
)
def test_where_a_loss_that_is_no_number_began(tmp_path, plan, stage):
    settings = config(**{f"plan__{key}": value for key, value in plan.items()})
    with pytest.raises(MegError) as caught:
        run_train(settings, tmp_path, factory=Infinite)
    assert f"step 1: the loss is nan, first in {stage}, h.2, micro-batch 0 of replica 0; lower" in str(caught.value)


@pytest.mark.parametrize(("plan", "stage"), [({"tp": 2}, 0), ({"pp": 2, "stages": [1, 3]}, 1)], ids=str)
def test_where_a_gradient_that_is_no_number_began(tmp_path, plan, stage):
    settings = config(**{f"plan__{key}": value for key, value in plan.items()})
    with pytest.raises(MegError) as caught:
        run_train(settings, tmp_path, factory=Cusp)
    where = f"stage {stage} (pipeline rank {stage}), the gradient of gate"
    assert f"step 1: the gradient norm is nan, first in {where}; lower" in str(caught.value)
