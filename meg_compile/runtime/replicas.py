"""Copies of a parameter that no longer are: a memory fault, a kernel that differs from run to run, a lost reduction.

What ranks hold alike (whole values on tp ranks, everything on dp and cp ranks, tied weights on pipeline ranks) starts
equal and gets equal gradients, so it stays equal to the last bit, or training is wrong from there on.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor

from meg_compile.errors import MegError
from meg_compile.runtime.executor import Executor

CHUNK = 2**22  # entries that are hashed at a time, so that little memory is needed
FACTOR = 0x3C6EF372FE94F82A  # even, so that the change of one bit can never cancel that of its word's square
LIMIT = 2**62
NONE = torch.iinfo(torch.int64).min
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Replicas:
    """Compares this rank's parameters, frozen ones too, with the copies that other ranks hold."""

    def __init__(self, executor: Executor):
        self.executor, self.at, mesh = executor, executor.groups.coords, executor.groups.mesh
        program = executor.program
        self.names: dict[str, tuple[bool, bool, tuple[int, ...]]] = {}
        for name, spec in program.params.items():
            kind = spec.sharded, program.splits(spec), program.holders(spec)
            copies = mesh.cp * len(kind[2]) * (1 if kind[0] else mesh.tp) * (1 if kind[1] else mesh.dp)
            if not spec.buffer and copies > 1:
                self.names[name] = kind
        kinds = dict.fromkeys(self.names.values())
        self.slots = {
            (kind, tp, dp): slot
            for slot, (kind, tp, dp) in enumerate(
                (kind, tp, dp)
                for kind in kinds
                for tp in range(mesh.tp if kind[0] else 1)
                for dp in range(mesh.dp if kind[1] else 1)
            )
        }

    def check(self, step: int) -> None:
        """A collective: one all-reduce of 16 bytes for each set of parameters that the same ranks hold.

        MegError, on every rank, that names a parameter whose copies differ and the ranks; step counts from 1.
        """
        if not self.slots:
            return
        held = [name for name in self.names if self.at.pp in self.names[name][2]]
        found = torch.stack([fingerprint(self.executor.tensors[name]) for name in held]).tolist() if held else []
        hashes = dict(zip(held, found, strict=True))
        sums: dict[int, int] = defaultdict(int)
        for place, name in enumerate(self.names):
            if name in hashes:
                sums[self._slot(name)] += hashes[name] * (2 * place + 1)
        slots = torch.full((len(self.slots), 2), NONE)
        for slot, number in sums.items():
            slots[slot] = torch.tensor([number % LIMIT, -(number % LIMIT)])
        slots = slots.to(self.executor.device)
        dist.all_reduce(slots, dist.ReduceOp.MAX)
        if any(largest != -negated for largest, negated in slots.tolist() if largest != NONE):
            raise MegError(f"step {step}: {self._difference(hashes)}")

    def _slot(self, name: str) -> int:
        kind = self.names[name]
        return self.slots[kind, self.at.tp if kind[0] else 0, self.at.dp if kind[1] else 0]

    def _difference(self, hashes: dict[str, int]) -> str:
        """The first parameter that differs, and which ranks hold what; from the hashes of all ranks."""
        mesh, device = self.executor.groups.mesh, self.executor.device
        mine = torch.tensor([hashes.get(name, NONE) for name in self.names], device=device)
        every = [torch.empty_like(mine) for _ in range(mesh.size)]
        dist.all_gather(every, mine)
        for (name, kind), of_ranks in zip(
            self.names.items(), zip(*(e.tolist() for e in every), strict=True), strict=True
        ):
            alike: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
            for rank, number in enumerate(of_ranks):
                at = mesh.coords(rank)
                if number != NONE:
                    alike[at.tp if kind[0] else 0, at.dp if kind[1] else 0][number].append(rank)
            for held in alike.values():
                if len(held) > 1:
                    return _said(name, sorted(held.values(), key=lambda ranks: (len(ranks), ranks)))
        raise AssertionError("the sums differed, and no hash does")


def fingerprint(tensor: Tensor) -> Tensor:
    """0 to 2^62 - 1, from the bits: the sum of the words and of their squares. Any changed bit changes it, and of many
    changed numbers hardly any that add up to nothing do not."""
    bits = tensor.detach().contiguous()
    bits = (torch.view_as_real(bits) if bits.is_complex() else bits).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.view(WORDS[bits.element_size()]).split(CHUNK):
        total += chunk.sum(dtype=torch.int64) + FACTOR * chunk.to(torch.int64).square_().sum()
    return total % LIMIT


def _said(name: str, groups: list[list[int]]) -> str:
    first, *others = (f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in groups)
    verb = "holds" if len(groups[0]) == 1 else "hold"
    return (
        f"copies of {name} have parted: {first} {verb} other bits than {' and '.join(others)}; a memory fault, an "
        "operator that is not deterministic, or code of the run's own that moved one copy: go on from earlier weights"
    )
