"""Capture as on a CPU without allocating: tensors on meta are replaced, while a model is captured, by fake CPU ones.

On meta, a factory call without a device (torch.arange(T)) would meet tensors of another device, and constants made in
forward would lose their values. Fake tensors have a device and no data; constants beside them stay real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

ValueOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class StandIns:
    """Fake tensors by the identity of what they stand for, and the reverse."""

    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    fakes: dict[int, torch.Tensor] = field(default_factory=dict)
    originals: dict[int, torch.Tensor] = field(default_factory=dict)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor on meta, always the same; any other tensor itself."""
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in self.fakes:
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self.fakes[id(tensor)], self.originals[id(fake)] = fake, tensor
        return self.fakes[id(tensor)]

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.originals.get(id(tensor), tensor)


@contextmanager
def stand_ins(model: nn.Module, value_of: ValueOf | None) -> Iterator[StandIns]:
    """Swap a model's parameters and buffers on meta for stand-ins, and put them back.

    value_of: gives the real value of a tensor on meta that a module holds as a plain attribute, or in a list or dict
              that is one, where it is known.
    """
    found = StandIns()
    before: list[tuple[Any, Any, torch.Tensor]] = []

    def swap(held: Any, replace: ValueOf) -> None:
        for name, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if isinstance(value, torch.Tensor) and value.is_meta:
                before.append((held, name, value))
                held[name] = replace(value)
            elif type(value) in (dict, list) and not str(name).startswith("_"):
                swap(value, replace)

    try:
        for module in model.modules():
            swap(module._parameters, found.fake)
            swap(module._buffers, found.fake)
            swap(vars(module), value_of or found.fake)
        yield found
    finally:
        for held, name, tensor in before:
            held[name] = tensor
