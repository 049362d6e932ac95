"""A model as it was, whatever its forward does to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back the attributes of every module (its mode among them), and what its lists, dicts and sets held."""
    before = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for held, values in contents:
                held.clear()
                (held.extend if isinstance(held, (list, deque)) else held.update)(values)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(held, held.copy()) for held in vars(module).values() if isinstance(held, (list, deque, dict, set))]
