"""Forget what a part of a stage computed, and compute it again when backward needs it (Chen et al. 2016,
arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from meg_compile.graph.nodes import RNG


class Recomputed(nn.Module):
    """Keeps the inputs of `body` for backward and nothing else. Random numbers are drawn alike the second time."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body
        self.rng: Any = getattr(body, RNG, None)

    def forward(self, *args: Any) -> Any:
        if self.rng is None:  # torch.compile then takes it into its graph
            return checkpoint(self.body, *args, use_reentrant=False)
        return checkpoint(self.body, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._replayed(self.rng.state.clone())

    @contextmanager
    def _replayed(self, state: Any) -> Iterator[None]:
        later, self.rng.state = self.rng.state, state
        try:
            yield
        finally:
            self.rng.state = later
