"""Optimizer, learning rate and clipping against torch's own, formula by formula."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meg_compile.runtime.optimizer import build_optimizer, clip_, learning_rates, set_lr

OPTIM = {
    "name": "adamw",
    "lr": 1e-2,
    "min_lr": 0.0,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "momentum": 0.0,
    "decay": "matrices",
    "schedule": "cosine",
}


def optim(**changes) -> SimpleNamespace:
    return SimpleNamespace(**OPTIM | changes)


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
    ],
)
def test_other_schedules(changes, steps, expected):
    lr = learning_rates(optim(**changes), steps)
    assert [lr(step) for step in range(len(expected))] == pytest.approx(expected)


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
