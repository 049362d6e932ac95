"""With sequence parallelism, keep a rank's part of what f gathered, and gather it again in backward.

The Linears behind f save their whole input for the gradients of their weights. Only a part of it is this rank's own;
gathering it a second time is what makes all activations shrink with the number of ranks (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from meg_compile.ops.collectives import Gathering, when_gathered


class _Kept:
    """What stands for the views of one gathered value that are saved; readers that follow one another share one
    gathering."""

    def __init__(self, gathering: Gathering):
        self.gathering, self.num_readers, self.whole = gathering, 0, None

    def again(self) -> torch.Tensor:
        whole = self.gathering.again() if self.whole is None else self.whole
        self.num_readers -= 1
        self.whole = whole if self.num_readers > 0 else None
        return whole


class Regather(saved_tensors_hooks):
    """A context around a forward."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self.kept: _Kept | None = None
        self.whole: torch.Tensor | None = None

    def __enter__(self) -> None:
        self.before = when_gathered(self._note)
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        when_gathered(self.before)
        self.kept = self.whole = None

    def _note(self, gathering: Gathering, whole: torch.Tensor) -> None:
        self.kept, self.whole = _Kept(gathering), whole.detach()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self.whole is None or self.kept is None or not _share_memory(tensor, self.whole):
            return tensor
        self.kept.num_readers += 1
        return self.kept, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        kept, *view = saved
        return kept.again().as_strided(*view)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
