"""Dropout where each tp rank holds its own part of a value: every rank must draw its own mask.

Dropout of a whole value needs nothing of this: the tp ranks seed their default generators alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ShardRng:
    """A stream of random numbers of one rank's own, beside the default generator of its device."""

    def __init__(self, seed: int, device: torch.device):
        self.device = device
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Start the stream anew."""
        with self._kept():
            self.generator().manual_seed(seed)
            self.state = self.generator().get_state()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Draw from this stream inside, from the default one outside."""
        with self._kept():
            self.generator().set_state(self.state)
            yield
            self.state = self.generator().get_state()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        generator = self.generator()
        outer = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(outer)

    def generator(self) -> torch.Generator:
        """The default generator of the device."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator


def sharded_dropout(x: torch.Tensor, p: float, train: bool, rng: ShardRng | None) -> torch.Tensor:
    return _drawn(rng, torch.dropout, x, p, train)


def sharded_attention(rng: ShardRng | None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Scaled dot product attention over this rank's heads, its dropout drawn from this rank's stream."""
    return _drawn(rng, torch.nn.functional.scaled_dot_product_attention, *args, **kwargs)


def _drawn(rng: ShardRng | None, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if rng is None:
        return function(*args, **kwargs)
    with rng.fork():
        return function(*args, **kwargs)
