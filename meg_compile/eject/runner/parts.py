"""Modules that hold a rank's parameters and buffers under the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meg_compile.ops.group import Group


class Part(nn.Module):
    """A part of the model: self.attn.c_attn.weight is its parameter of that name, self[3] what is called "3"."""

    def __init__(self, tp: Group, cp: Group, device: torch.device):
        super().__init__()
        self.tp, self.cp, self.device = tp, cp, device

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))


class Stage(Part):
    """A pipeline stage, as one rank of tensor parallelism runs it.

    FIELDS: of the batch, that it reads. RECEIVED, SENT: activations, on meta. BLOCKS: which of its parts are blocks.
    """

    INDEX: ClassVar[int]
    FIELDS: ClassVar[tuple[str, ...]]
    RECEIVED: ClassVar[tuple[Tensor, ...]]
    SENT: ClassVar[tuple[Tensor, ...]]
    BLOCKS: ClassVar[dict[str, type[Part]]] = {}

    def __init__(self, tensors: Mapping[str, Tensor], tp: Group, cp: Group, device: torch.device):
        """tensors: this rank's part of every parameter and buffer, by name."""
        super().__init__(tp, cp, device)
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for i, part in enumerate(path):
                if part not in holder._modules:
                    kind = self.BLOCKS.get(".".join(path[: i + 1]), Part)
                    holder.register_module(part, kind(tp, cp, device))
                holder = holder._modules[part]  # type: ignore[assignment]
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(last, tensor)
            else:
                holder.register_buffer(last, tensor)
