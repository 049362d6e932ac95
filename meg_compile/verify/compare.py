"""The compiled program on all ranks against the plain model on rank 0, step by step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meg_compile.passes.tokens import HALVES
from meg_compile.train.step import Trainer
from meg_compile.verify.plain import Plain
from meg_compile.verify.report import Difference, Report

# float64 rounds at 1e-16: right programs differ by 1e-11 at most (AdamW's small denominators included).
# float32 rounds at 6e-8: right ones were seen to differ by 2e-6, with GPT-2s of up to 24 layers or 5 million
# parameters; faults show from 1e-3 on.
# bfloat16 rounds at 4e-3 and float16 at 5e-4, at every activation. Where micro-batches round alike (tp=1), gradients
# were seen to differ by 1e-8, with tp=2, whose partial sums are rounded, by 0.06 and 0.005 of their largest number
# (a layer norm's bias). A gradient that is not summed over two replicas is off by 1, the norm by 0.3.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 0.2, "fp16": 0.02}

# A tensor's error is relative to its own largest number, but to no less than this share of the largest of its kind in
# the model: a gradient that is zero in exact arithmetic (the bias of an attention's keys) is pure rounding noise.
FLOOR, FLOOR_OF_HALVES = 1e-3, 3e-2
TINY = 1e-300


def verify(
    config: Any,
    program: Any,
    executor: Any,
    groups: Any,
    factory: Callable[[], nn.Module],
    loss: Callable | None,
    dataset: Any,
    *,
    steps: int,
    update: bool = True,
) -> Report:
    """Compare starting weights (bit by bit), then of each step the loss, every gradient, the norm and every weight.

    The program must have been compiled from the same factory, with dropout="exact" or under `DropoutOff`, and be
    freshly loaded. All ranks call this and get the same `ok`; rank 0 holds the whole plain model for it. With
    update=False no weight moves and the gradients are cleared afterwards, so that training can follow.

    In float64 both sides train on by themselves. In float32 and below the plain side takes over the compiled gradients
    once they are compared: AdamW turns the rounding noise of a gradient near zero into a step of full size, so two
    right runs part there, while the update from equal gradients must agree.
    """
    tolerance = config.verify.tolerance or TOLERANCES[config.precision]
    draws = program.draws
    dropout = f"{len(draws)} dropouts with the same masks" if draws else "dropout off"
    report = Report(f"{program.plan}, {config.precision}, against the plain model ({dropout})", tolerance)
    trainer = Trainer(config, program, executor, groups, dataset)
    plain = Plain(config, factory, loss, dataset, executor.device, draws) if groups.rank == 0 else None
    found = report.differences

    found += _compare(plain, executor.gather("value"), 0, "start", 0.0)
    for step in range(steps):
        compiled = trainer.gradients(step)
        while not math.isfinite(compiled.norm):  # overflow in fp16: the next loss scale is smaller
            trainer.scale.update(overflow=True)
            trainer.optimizer.zero_grad()
            compiled = trainer.gradients(step)
        if plain:
            plain_loss, plain_norm = plain.gradients(step, trainer.scale.value)
            found.append(Difference(step + 1, "loss", "", _relative(compiled.loss, plain_loss), tolerance))
            found.append(Difference(step + 1, "norm", "", _relative(compiled.norm, plain_norm), tolerance))
        found += _compare(plain, executor.gather("grad"), step + 1, "gradient", tolerance, config.precision != "fp64")
        if not update:
            trainer.optimizer.zero_grad()
            break
        trainer.update(step, compiled.norm)
        if plain:
            plain.update(step)
        found += _compare(plain, executor.gather("value"), step + 1, "weight", tolerance)
    report.ok = _agreed(all(difference.ok for difference in found), executor.device)
    return report


def _compare(
    plain: Plain | None,
    gathered: Iterable[tuple[str, Tensor | None]],
    step: int,
    what: str,
    tolerance: float,
    take_over: bool = False,
) -> list[Difference]:
    """One difference a parameter, or a trainable one for gradients. Ranks without a plain model only help to gather.

    take_over: the plain parameters' gradients become the compiled ones.
    """
    if plain is None:
        for _ in gathered:
            pass
        return []
    of_gradients = what == "gradient"
    parameters = {name: p for name, p in plain.parameters().items() if p.requires_grad or not of_gradients}
    expected = {name: p.grad if of_gradients else p.detach() for name, p in parameters.items()}
    floor = (FLOOR_OF_HALVES if plain.dtype in HALVES else FLOOR) * max(map(_largest, expected.values()), default=0.0)
    found, seen = [], set()
    for name, tensor in gathered:
        if name not in parameters:
            continue  # a buffer
        found.append(Difference(step, what, name, _error(tensor, expected[name], floor), tolerance))
        seen.add(parameters[name])
        if take_over and tensor is not None and (grad := parameters[name].grad) is not None:
            grad.copy_(tensor)
    missing = {parameter: name for name, parameter in reversed(parameters.items()) if parameter not in seen}
    return found + [Difference(step, what, name, math.inf, tolerance) for name in missing.values()]


def _error(compiled: Tensor | None, plain: Tensor | None, floor: float) -> float:
    """max |compiled - plain| / max |plain|, in float64; a gradient that is None counts as zeros."""
    assert compiled is not None, "rank 0 gets whole tensors"
    plain = torch.zeros_like(compiled) if plain is None else plain.cpu()
    if compiled.shape != plain.shape or compiled.dtype != plain.dtype:
        return math.inf
    return _largest(compiled.double() - plain.double()) / max(_largest(plain), floor, TINY)


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or tensor.numel() == 0 else tensor.abs().max().item()


def _relative(compiled: float, plain: float) -> float:
    return abs(compiled - plain) / max(abs(plain), TINY)


def _agreed(ok: bool, device: torch.device) -> bool:
    """Rank 0's verdict, on every rank."""
    verdict = torch.tensor([ok], dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(verdict, 0)
    return bool(verdict.item())
