"""The device, its clock and its memory. Only here do the checks tell a GPU from the CPU."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meg_compile import Plan
from meg_compile.runtime.groups import Groups, init_groups

# Dense bf16 FLOP/s by what a device's name contains, from the vendor's data sheets; the first that fits.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H200": 989e12, "H100": 989e12}
PEAK_FLOPS |= {"A100": 312e12}


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[Groups]:
    """The groups of a run on one process, on the backends that a run has."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_groups(Plan().mesh, device.type)
    finally:
        dist.destroy_process_group()


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(device: torch.device) -> float | None:
    """Of dense bf16 products, in a second; None where it is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name(device)), None)


def now(device: torch.device) -> float:
    """Seconds, once all that was started is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Memory:
    """Bytes of tensors that live at once at most (`peak`), beyond those that live when it is made."""

    def __init__(self, device: torch.device):
        self.device, self.counted = device, _Counted()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> Memory:
        if self.device.type == "cpu":
            self.counted.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        if self.device.type == "cpu":
            self.counted.__exit__(*args)

    @property
    def peak(self) -> int:
        if self.device.type == "cpu":
            return self.counted.peak
        return torch.cuda.max_memory_allocated(self.device) - self.before


class _Counted(TorchDispatchMode):
    """Counts what operators return on the CPU, whose allocator keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known or not storage.nbytes():
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.now -= num_bytes
