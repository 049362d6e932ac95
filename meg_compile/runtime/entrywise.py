"""Does an optimizer act on single numbers, so that on the parts of a parameter it takes the steps of the whole?

AdamW does, Adafactor (which factors a matrix) and Muon (which orthogonalises one) do not. Nothing says so of a class:
a few steps on small random tensors, whole and in pieces, tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
STEPS = 4
TOLERANCE = 1e-12
"""Relative, in float64: a fused kernel rounds the last numbers of a tensor otherwise (1e-16 a step)."""


def random_steps(make: Make) -> bool:
    """Whether the same gradients give other steps from another state of torch's generator."""
    return not _close(_after(make, [_values(0)], seed=1), _after(make, [_values(0)], seed=2))


def couples_entries(make: Make) -> bool:
    """Whether the rows or the columns of a matrix, each a parameter of an optimizer of its own, move otherwise."""
    whole = _values(0)
    (moved,) = _after(make, [whole])
    for dim in (0, 1):
        pieces = [[value.narrow(dim, 0, 3), value.narrow(dim, 3, value.shape[dim] - 3)] for value in whole]
        parts = [_after(make, [list(piece)])[0] for piece in zip(*pieces, strict=True)]
        if not _close([torch.cat(parts, dim)], [moved]):
            return True
    return False


def couples_parameters(make: Make) -> bool:
    """Whether two parameters of one optimizer move otherwise than each in an optimizer of its own."""
    together = _after(make, [_values(0), _values(1)])
    apart = [_after(make, [_values(i)])[0] for i in (0, 1)]
    return not _close(together, apart)


def _values(number: int) -> list[Tensor]:
    """A matrix [7, 5], then its gradients, of sizes that differ between steps and matrices."""
    generator = torch.Generator().manual_seed(number)
    sizes = [1.0] + [0.1 * (1 + step) * 3.0**number for step in range(STEPS)]
    return [size * torch.randn(7, 5, dtype=torch.float64, generator=generator) for size in sizes]


def _after(make: Make, values: Sequence[Sequence[Tensor]], seed: int = 0) -> list[Tensor]:
    """The parameters after as many steps as there are gradients; each of `values` is a start and its gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parameters = [nn.Parameter(start.clone(memory_format=torch.contiguous_format)) for start, *_ in values]
        optimizer = make(parameters)
        for gradients in zip(*(rest for _, *rest in values), strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]


def _close(ours: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    largest = max(other.abs().max().item() for other in others)
    return all((one - other).abs().max().item() <= TOLERANCE * largest for one, other in zip(ours, others, strict=True))
