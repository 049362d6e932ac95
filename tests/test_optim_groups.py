"""Parameter groups, frozen parts and foreign optimizers: under plans as in the plain model, or refused."""

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import models
import pytest
import torch
from torch import nn
from training import config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.loss import cross_entropy
from meg_compile.plan import Plan
from meg_compile.runtime.optim_faults import freeze, optim_faults
from meg_compile.runtime.optimizer import build_optimizer
from meg_compile.verify import verify

SMALL = partial(models.TinyGPT, layers=2)
GROUPS = [{"params": "lm_head", "lr_scale": 0.5}, {"params": ["*.fc1", "h.0.attn.q.weight"], "weight_decay": 0.3}]


class Coupled(torch.optim.SGD):
    """Every step is as long for all parameters together."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(grads, 1 / float(torch.nn.utils.get_total_norm(grads)))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


def settings(plan=None, **optim):
    changes = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "momentum": None, "eps": None, "betas": None} | optim
    if "_target_" in optim:
        changes |= {"name": None} | {"weight_decay": optim.get("weight_decay")}
    plan = {f"plan__{name}": value for name, value in (plan or {}).items()}
    batch = {"train__micro_batch_size": 1, "train__global_batch_size": 8 * plan.get("plan__dp", 1)}
    own = {f"optim__{name}": value for name, value in changes.items() if name not in ARGUMENTS}
    found = config(train__steps=3, train__clip_grad=1.0, **batch, **plan, **own)
    found.optim.args = {name: value for name, value in optim.items() if name in ARGUMENTS}
    return found


ARGUMENTS = ("lr_decay", "centered")


def errors_of(settings, factory: Callable[[], nn.Module] = SMALL, see=lambda executor, program: None):
    """The largest error of two steps against the plain model, and what `see` says on each rank."""

    def build():
        model = factory()
        freeze(model, settings.optim.frozen)
        return model

    def work(program, executor, groups):
        report = verify(settings, program, executor, groups, build, cross_entropy, models.FixedRows(), steps=2)
        assert report.ok or groups.rank, [str(w) for w in report.worst(6)]
        return report.worst(1)[0].error if groups.rank == 0 else None, see(executor, program)

    results = on_ranks(settings, work, build)
    return results[0][0], [seen for _, seen in results]


PLANS = {
    "tp2_pp2_sp": {"tp": 2, "pp": 2, "sp": True},
    "dp2_zero3": {"dp": 2, "zero": 3},
    "pp2_dp2_zero1": {"pp": 2, "dp": 2, "zero": 1},
}


@pytest.mark.parametrize("plan", PLANS)
def test_groups_are_those_of_the_plain_model_under_any_plan(plan):
    """Fused attention weights and the tied table by its second name; decay of some alone."""
    errors_of(settings(PLANS[plan], groups=GROUPS, no_decay=["wpe"]))


def test_what_is_in_which_group():
    names = {
        name: nn.Parameter(torch.ones([2] * dims))
        for name, dims in (("w", 2), ("b", 1), ("m.w", 2), ("m.b", 1), ("e", 2))
    }
    names |= {"tied": names["e"], "frozen": nn.Parameter(torch.ones(1), requires_grad=False)}
    where = {parameter: name for name, parameter in reversed(names.items())}

    def groups(**changes):
        optimizer = build_optimizer(names, settings(**changes).optim)
        return {
            where[p]: (group["weight_decay"], group.get("lr_scale", 1.0), group["betas"])
            for group in optimizer.param_groups
            for p in group["params"]
        }

    plain, none = (0.1, 1.0, (0.9, 0.999)), (0.0, 1.0, (0.9, 0.999))
    assert groups() == {"w": plain, "b": none, "m.w": plain, "m.b": none, "e": plain}
    assert groups(decay="all", no_decay=["tied", "m"]) == {"w": plain, "b": plain, "m.w": none, "m.b": none, "e": none}
    own = groups(
        groups=[{"params": "m", "lr_scale": 2.0}, {"params": ["tied"], "weight_decay": 0.3, "betas": [0.5, 0.6]}]
    )
    assert own["m.w"] == (0.1, 2.0, (0.9, 0.999)) and own["m.b"] == (0.0, 2.0, (0.9, 0.999))
    assert own["e"] == (0.3, 1.0, (0.5, 0.6)) and own["w"] == plain and own["b"] == none


def program_of(plan, factory: Callable[[], nn.Module] = SMALL):
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}
    return compile(factory, inputs, plan)


@pytest.mark.parametrize(
    ("changes", "key", "problem", "fix"),
    [
        ({"no_decay": ["wtee"]}, "optim.no_decay", "matches no parameter", "wte"),
        (
            {"groups": [{"params": "h.*.atn", "lr_scale": 2}]},
            "optim.groups.0.params",
            "matches no parameter",
            "h.*.attn",
        ),
        ({"groups": [{"lr_scale": 2}]}, "optim.groups.0.params", "says nowhere", "params: "),
        (
            {"groups": [{"params": "wte"}, {"params": "lm_head"}]},
            "optim.groups.1.params",
            "optim.groups.0 already",
            "one",
        ),
        ({"groups": [{"params": "wte", "lr": 1}]}, "optim.groups.0.lr", "no such option", "lr_scale"),
        ({"groups": [{"params": "wte", "beta": [0, 0]}]}, "optim.groups.0.beta", "no such option", "betas"),
        ({"groups": [{"params": "wte", "lr_scale": -1}]}, "optim.groups.0.lr_scale", "0 or more", "0.1"),
        ({"_target_": "torch.optim.Rprop", "weight_decay": 0.1}, "optim.weight_decay", "takes none", "leave it out"),
        ({"_target_": "torch.optim.LBFGS"}, "optim._target_", "closure", "AdamW"),
        ({"_target_": "torch.optim.SparseAdam"}, "optim._target_", "dense gradients", "AdamW"),
        ({"_target_": "torch.optim.Muon"}, "optim._target_", "2D", "AdamW"),
    ],
)
def test_what_cannot_work_is_refused(changes, key, problem, fix):
    faults = optim_faults(settings(**changes).optim, PROGRAMS[Plan()]())
    assert any(f.key == key and problem in f.problem and fix in f.fix for f in faults), [*map(str, faults)]


TP, PP, ZERO = Plan(tp=2), Plan(pp=2), Plan(dp=2, zero=1)


@pytest.mark.parametrize(
    ("target", "allowed", "refused"),
    [
        ("torch.optim.Adafactor", [Plan(), PP, Plan(dp=2)], {TP: "use plan.tp=1", ZERO: "use plan.zero=0"}),
        (
            "test_optim_groups.Coupled",
            [Plan(), Plan(dp=2)],
            {PP: "use plan.pp=1", TP: "use plan.tp=1", ZERO: "plan.zero=0"},
        ),
        ("test_optim_groups.Noisy", [Plan()], {PP: "draws none", Plan(dp=2): "draws none"}),
        *[
            (f"torch.optim.{name}", [TP, PP, ZERO], {})
            for name in "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
        ],
    ],
)
def test_an_optimizer_that_needs_what_a_plan_takes_apart_is_refused(target, allowed, refused):
    optim, programs = settings(_target_=target).optim, {plan: PROGRAMS[plan]() for plan in [*allowed, *refused]}
    for plan in allowed:
        assert not optim_faults(optim, programs[plan]), plan
    for plan, fix in refused.items():
        (fault,) = optim_faults(optim, programs[plan])
        assert fault.key == "optim._target_" and fix in str(fault), str(fault)


def cached(plan):
    found = []

    def program():
        if not found:
            found.append(program_of(plan))
        return found[0]

    return program


PROGRAMS = {plan: cached(plan) for plan in (Plan(), TP, PP, ZERO, Plan(dp=2))}


@pytest.mark.parametrize(
    ("target", "arguments", "plan"),
    [
        ("torch.optim.Adagrad", {"lr_decay": 0.01, "groups": GROUPS}, {"tp": 2, "dp": 2, "zero": 2}),
        ("torch.optim.RMSprop", {"momentum": 0.9, "centered": True}, {"dp": 2, "zero": 3}),
        (
            "torch.optim.Adafactor",
            {"frozen": ["*.attn.k.bias"]},
            {"pp": 2, "dp": 2},
        ),  # whose gradients are rounding noise
    ],
)
def test_any_class_of_torch_takes_the_plain_models_steps(target, arguments, plan):
    errors_of(settings(plan, _target_=target, **arguments))


FROZEN = {
    "first": ["lm_head", "wpe", "h.0", "h.1"],
    "last": ["h.2", "h.3", "ln_f"],
    "between": ["h.1", "h.2"],
    "all but the head": ["wpe", "h", "wte", "ln_f"],
    "norms": ["*.n1", "*.n2", "*.bias"],
}


@pytest.mark.parametrize(
    ("frozen", "plan"),
    [
        ("first", {"pp": 2, "dp": 2, "zero": 1}),
        ("first", {"pp": 2, "vpp": 2, "schedule": "interleaved_zero_bubble"}),
        ("norms", {"tp": 2, "pp": 2, "sp": True, "schedule": "gpipe"}),
        ("last", {"pp": 4}),
        ("last", {"pp": 2, "dp": 2, "zero": 3}),
        ("between", {"pp": 2, "vpp": 2, "schedule": "zbv_zero_bubble"}),
        ("all but the head", {"pp": 2, "vpp": 2, "schedule": "dualpipev"}),
    ],
)
def test_frozen_parts_and_whole_frozen_stages(frozen, plan):
    """Equal to the plain model; frozen weights keep their bits, have no gradient and no state and are in no sum."""
    factory = partial(models.TinyGPT, tied=frozen in ("first", "norms"))
    found = settings(plan, frozen=FROZEN[frozen])
    start = frozen_values(factory, found.optim.frozen)

    def see(executor, program):
        still = [name for name in executor.tensors if name in start]
        assert all(executor.tensors[name].grad is None for name in still)
        assert not set(executor.parameters) & set(start)
        assert not any(set(names) & set(start) for names, _ in executor.shared)
        optimizer = build_optimizer(executor.by_name(), found.optim)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        assert held == set(executor.parameters.values())
        ends = {name: whole for name, whole in executor.gather("value") if whole is not None}
        return [name for name in ends if name in start and not torch.equal(ends[name], start[name])], still

    _, seen = errors_of(found, factory, see)
    assert not any(moved for moved, _ in seen) and {name for _, still in seen for name in still} == set(start)


def frozen_values(factory, patterns):
    """The starting weights of the parameters that are frozen."""
    torch.manual_seed(config().train.seed)
    model = factory().double()
    freeze(model, patterns)
    return {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}


def test_patterns_to_freeze_must_match_and_leave_something():
    with pytest.raises(Refused, match=r"optim.frozen=h.9: matches no parameter; did you mean h.\d\?"):
        freeze(models.TinyGPT(), ["wte", "h.9"])
    program = program_of(Plan(), lambda: models.TinyGPT(layers=1).requires_grad_(False))
    (fault,) = optim_faults(settings(frozen=["*"]).optim, program)
    assert fault.key == "optim.frozen" and "nothing to train" in fault.problem
    (fault,) = optim_faults(settings().optim, program)
    assert fault.key == "model"


def test_the_command_line_names_a_class_and_its_arguments(monkeypatch, tmp_path):
    import run
    from meg_compile import driver
    from meg_compile.config import Here, resolve

    monkeypatch.chdir(tmp_path)
    seen = []

    def keep(plain, faults, run_dir, directory, world):
        seen.append(resolve(plain, faults, Here(), directory))
        return {"status": "ok"}

    with patch.object(driver, "run", keep):
        run.main(
            ["optim._target_=torch.optim.Adagrad", "+optim.lr_decay=0.01", "optim.groups=[{params: wte, lr_scale: 2}]"]
        )
        run.main(["optim._target_=torch.optim.Adagrad", "optim.lr_decy=0.01"])
    (found, faults), (_, wrong) = seen
    assert not faults and found.optim.target == "torch.optim.Adagrad" and found.optim.args == {"lr_decay": 0.01}
    assert (found.optim.name, found.optim.betas, found.optim.weight_decay) == (None, None, None)  # those are AdamW's
    assert found.optim.groups == [{"params": "wte", "lr_scale": 2}]
    assert [fault.key for fault in wrong] == ["optim.lr_decy"] and "lr_decay" in wrong[0].fix
