"""The comparison with the plain model: it passes what is right and catches each kind of fault."""

import io
import math
from collections.abc import Callable

import models
import pytest
import torch
from rich.console import Console
from torch import nn
from training import config, on_ranks

from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy
from meg_compile.runtime.executor import Executor
from meg_compile.verify import Difference, DropoutOff, Report, verify

SETTINGS = {"optim__name": "adamw", "optim__lr": 1e-2, "optim__weight_decay": 0.1, "train__clip_grad": 1.0}


def run_verify(
    settings, factory: Callable[[], nn.Module] = models.TinyGPT, executor_class=Executor, steps=3, update=True
):
    dataset = models.FixedRows()
    ends = []

    def work(program, executor, groups):
        report = verify(
            settings, program, executor, groups, factory, cross_entropy, dataset, steps=steps, update=update
        )
        ends.append(executor)
        return report

    reports = on_ranks(settings, work, factory, dataset, executor_class)
    assert len({report.ok for report in reports}) == 1
    assert all(not report.differences for report in reports[1:])
    return reports[0], ends


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)])
def test_what_is_right_passes(tp, pp, dp, precision):
    settings = config(plan__tp=tp, plan__pp=pp, plan__dp=dp, precision=precision, **SETTINGS)
    report, _ = run_verify(settings)
    assert report.ok, report.worst()
    num_parameters = len(list(models.TinyGPT().parameters()))
    assert len(report.differences) == num_parameters + 3 * (2 + 2 * num_parameters)
    assert report.to_dict()["largest_error"]["start"] == 0


def test_one_step_leaves_everything_as_it_was():
    report, executors = run_verify(config(plan__tp=2, **SETTINGS), steps=1, update=False)
    assert report.ok
    assert {difference.what for difference in report.differences} == {"start", "loss", "norm", "gradient"}
    for executor in executors:
        start = {name: tensor.clone() for name, tensor in executor.tensors.items()}
        executor.load()
        assert all(torch.equal(start[name], tensor) for name, tensor in executor.tensors.items())
        assert all(parameter.grad is None for parameter in executor.parameters.values())


class Partial(models.TinyGPT):
    """A frozen embedding, and a weight that nothing reads."""

    def __init__(self):
        super().__init__(tied=False)
        self.wpe.requires_grad_(False)
        self.unread = torch.nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_frozen_and_unread_parameters(precision):
    report, _ = run_verify(config(plan__tp=2, precision=precision, **SETTINGS), Partial)
    assert report.ok, report.worst()
    named = {(difference.what, difference.name) for difference in report.differences}
    assert ("weight", "wpe.weight") in named and ("gradient", "wpe.weight") not in named
    assert ("gradient", "unread") in named


def test_dropout_is_off_on_both_sides():
    def factory():
        return GPT2(vocab_size=64, context=16, layers=2, hidden=16, heads=2, dropout=0.3)

    with DropoutOff() as dropout:
        report, _ = run_verify(config(), factory)
    assert report.ok, report.worst()
    assert dropout.num_switched_off > 0
    assert "dropout off" in report.title


class NoSum(Executor):
    """Replicas keep their own gradients."""

    def reduce_gradients(self):
        pass


class WrongNorm(Executor):
    """Both tp ranks count every parameter."""

    def norm_squared(self):
        return torch.stack([p.grad.square().sum() for p in self.parameters.values()]).sum()


class WrongStart(Executor):
    def load(self, *args):
        super().load(*args)
        self.tensors["ln_f.bias"].data[0] += 1e-300


class LostGradient(Executor):
    def reduce_gradients(self):
        super().reduce_gradients()
        self.parameters["h.1.fc1.bias"].grad = None


class NotANumber(Executor):
    def gather(self, kind="value"):
        for name, tensor in super().gather(kind):
            yield name, tensor * math.nan if tensor is not None and name == "wpe.weight" else tensor


class Forgotten(Executor):
    def gather(self, kind="value"):
        yield from ((name, tensor) for name, tensor in super().gather(kind) if name != "ln_f.weight")


@pytest.mark.parametrize(
    ("fault", "plan", "what", "name"),
    [
        (NoSum, {"plan__dp": 2}, "gradient", "wte.weight"),
        (WrongNorm, {"plan__tp": 2}, "norm", ""),
        (WrongStart, {"plan__tp": 2}, "start", "ln_f.bias"),
        (LostGradient, {"plan__tp": 2}, "gradient", "h.1.fc1.bias"),
        (NotANumber, {}, "start", "wpe.weight"),
        (Forgotten, {"plan__pp": 2}, "weight", "ln_f.weight"),
    ],
)
def test_faults_are_caught_and_named(fault, plan, what, name):
    report, _ = run_verify(config(**plan, **SETTINGS), executor_class=fault, steps=1)
    assert not report.ok
    failed = [difference for difference in report.worst(1000) if not difference.ok]
    assert (what, name) in {(difference.what, difference.name) for difference in failed}
    screen = io.StringIO()
    report.show(Console(file=screen, width=120))
    assert "NOT EQUAL" in screen.getvalue()
    assert failed[0].name in screen.getvalue()


def test_float32_catches_a_fault_too():
    report, _ = run_verify(config(plan__dp=2, precision="fp32", **SETTINGS), executor_class=NoSum, steps=1)
    assert not report.ok


def test_worst_come_first_and_the_table_is_whole():
    errors = {"a": 1e-12, "b": math.nan, "c": 0.0, "d": 1e-3, "e": math.inf}
    report = Report("t", 1e-9, False, [Difference(1, "weight", name, error, 1e-9) for name, error in errors.items()])
    assert [difference.name for difference in report.worst(4)] in (["b", "e", "d", "a"], ["e", "b", "d", "a"])
    assert report.to_dict()["status"] == "failed"
