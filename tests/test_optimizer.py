"""Optimizer, learning rate and clipping against torch's own, formula by formula."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from training import config

from meg_compile.config.schema import OptimConfig
from meg_compile.runtime.learning_rate import learning_rates
from meg_compile.runtime.optimizer import build_optimizer, clip_, set_lr


def optim(**changes) -> OptimConfig:
    given = {"name": "adamw", "lr": 1e-2, "warmup_steps": 3, "weight_decay": 0.1, "schedule": "cosine"}
    return replace(config().optim, **given | changes)


def test_warm_up_and_cosine():
    lr = learning_rates(optim(), steps=10)
    expected = [1e-2 * (s + 1) / 3 if s < 3 else 0.5e-2 * (1 + math.cos(math.pi * (s - 3) / 7)) for s in range(10)]
    assert [lr(step) for step in range(10)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "steps", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 2}, 4, [0.5e-2, 1e-2, 1e-2, 1e-2]),
        ({"warmup_steps": 0, "min_lr": 1e-3}, 2, [1e-2, 5.5e-3, 1e-3, 1e-3]),
        ({"warmup_steps": 8}, 4, [1.25e-3, 2.5e-3, 3.75e-3, 5e-3]),
        (
            {"schedule": "linear", "warmup_steps": 2, "min_lr": 2e-3},
            6,
            [5e-3, 1e-2, 1e-2, 8e-3, 6e-3, 4e-3, 2e-3, 2e-3],
        ),
        ({"schedule": "linear", "warmup_steps": 0, "decay_steps": 2}, 6, [1e-2, 5e-3, 0, 0]),
        ({"schedule": "inverse_sqrt", "warmup_steps": 4, "min_lr": 4e-3}, 99, {3: 1e-2, 4: 1e-2, 16: 5e-3, 98: 4e-3}),
        ({"schedule": "inverse_sqrt", "warmup_steps": 0}, 99, {0: 1e-2, 1: 1e-2, 4: 5e-3}),
        (
            {"schedule": "wsd", "warmup_steps": 1, "wsd_decay_steps": 4},
            10,
            {0: 1e-2, 6: 1e-2, 7: 7.5e-3, 9: 2.5e-3, 10: 0},
        ),
        ({"schedule": "wsd", "wsd_decay_steps": 4, "wsd_decay": "cosine", "min_lr": 1e-3}, 10, {6: 1e-2, 8: 5.5e-3}),
        ({"schedule": "wsd", "wsd_decay_steps": 4, "wsd_decay": "sqrt"}, 10, {6: 1e-2, 7: 5e-3, 10: 0}),
        ({"schedule": "wsd", "wsd_decay_steps": 2, "wsd_decay": "exponential"}, 10, {8: 1e-2, 9: 1e-2 * (2**0.5 - 1)}),
        ({"schedule": "wsd", "warmup_steps": 0}, 50, {44: 1e-2, 45: 1e-2, 46: 8e-3, 49: 2e-3}),
    ],
)
def test_other_schedules(changes, steps, expected):
    lr = learning_rates(optim(**changes), steps)
    expected = expected if isinstance(expected, dict) else dict(enumerate(expected))
    assert {step: lr(step) for step in expected} == pytest.approx(expected, abs=1e-16)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_are_torchs(schedule):
    schedulers, (warmup, steps) = torch.optim.lr_scheduler, (3, 11)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
    rising = schedulers.LinearLR(optimizer, 1 / warmup, 1, warmup - 1)
    falling = (
        schedulers.CosineAnnealingLR(optimizer, steps - warmup, 1e-3)
        if schedule == "cosine"
        else schedulers.LinearLR(optimizer, 1, 0.1, steps - warmup)
    )
    scheduler = schedulers.SequentialLR(optimizer, [rising, falling], [warmup])
    lr = learning_rates(optim(schedule=schedule, min_lr=1e-3, warmup_steps=warmup), steps)
    for step in range(steps + 1):
        assert lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("decay", ["matrices", "all"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_are_torchs(name, decay):
    def steps_of(optimizer_of):
        torch.manual_seed(0)
        parameters = {
            "w": nn.Parameter(torch.randn(3, 2).double()),
            "b": nn.Parameter(torch.randn(3).double()),
        }
        optimizer = optimizer_of(parameters)
        for _ in range(3):
            for parameter in parameters.values():
                parameter.grad = torch.randn_like(parameter)
            set_lr(optimizer, 0.02)
            optimizer.step()
        return parameters

    def torchs(parameters):
        groups = [
            {"params": [parameters["w"]], "weight_decay": 0.1},
            {"params": [parameters["b"]], "weight_decay": 0.1 if decay == "all" else 0.0},
        ]
        if name == "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)

    ours = steps_of(lambda parameters: build_optimizer(parameters, optim(name=name, decay=decay, momentum=0.9)))
    for name_of, expected in steps_of(torchs).items():
        torch.testing.assert_close(ours[name_of], expected, rtol=1e-13, atol=1e-15)


def test_a_tied_parameter_moves_once_and_no_parameters_are_fine():
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = build_optimizer({"a": parameter, "b": parameter}, optim(name="sgd", weight_decay=0.0))
    set_lr(optimizer, 0.25)
    optimizer.step()
    assert torch.equal(parameter, torch.full((2, 2), 0.75))
    build_optimizer({}, optim()).step()


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 100.0])
def test_clipping_is_torchs(clip_grad):
    def gradients():
        torch.manual_seed(0)
        parameters = {name: nn.Parameter(torch.zeros(3).double()) for name in "ab"}
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        return parameters

    ours, expected = gradients(), gradients()
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), clip_grad or math.inf)
    clip_(ours, norm.item(), clip_grad)
    for name in "ab":
        torch.testing.assert_close(ours[name].grad, expected[name].grad, rtol=1e-15, atol=0)
