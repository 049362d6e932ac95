"""Which rows a replica reads at which step.

The order of rows depends on the dataset's length, the seed, `shuffle` and the epoch alone, so every plan trains on the
same global batches. An epoch is as many whole global batches as the dataset holds: the rows left over are not read in
that epoch (with `shuffle` they are others in each). Of a global batch of G rows, replica d reads the d-th contiguous
G / dp.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meg_compile.errors import Fault, Refused
from meg_compile.train.rows import check_alike, fold, num_rows, read_row, seeded_reads

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Batches:
    """`batches[step]`: the rows that replica `dp_rank` of `dp` reads at a global step, field -> tensor [G / dp, ...].

    The dataset is map-style; what its rows may be is said at `read_row`. Each row is read with the global generators
    of torch, random and numpy seeded from (seed, position in the run), and they get their states back afterwards. So a
    dataset that draws from them gives the same row to every rank that reads that position, and another row at every
    other position.

    Refused: a dataset that cannot be indexed or holds less than one global batch; while reading, a name in `fields`
    that a row lacks, a field that is no tensor, rows of unequal shapes.
    """

    def __init__(
        self,
        dataset,
        *,
        global_batch_size: int,
        dp: int = 1,
        dp_rank: int = 0,
        seed: int = 0,
        shuffle: bool = False,
        fields: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        assert global_batch_size % dp == 0 and 0 <= dp_rank < dp
        self.num_rows = num_rows(dataset)
        if self.num_rows < global_batch_size:
            problem = f"the dataset ({type(dataset).__name__}) has {self.num_rows} rows, less than one global batch"
            fix = f"use at most {self.num_rows}, or more data"
            raise Refused(Fault("train.global_batch_size", global_batch_size, problem, fix))
        self.dataset, self.fields, self.dtype = dataset, fields, dtype
        self.global_batch_size, self.replica_size = global_batch_size, global_batch_size // dp
        self.first_row, self.seed, self.shuffle = dp_rank * self.replica_size, seed, shuffle
        self._order = lru_cache(maxsize=1)(self._order_of_epoch)

    def rows(self, step: int) -> list[tuple[int, int]]:
        """(position in the run, index in the dataset) of each row that this replica reads at `step`."""
        epoch, batch = divmod(step, self.num_rows // self.global_batch_size)
        order = self._order(epoch)
        offsets = range(self.first_row, self.first_row + self.replica_size)
        in_epoch, in_run = batch * self.global_batch_size, step * self.global_batch_size
        return [(in_run + offset, int(order[in_epoch + offset])) for offset in offsets]

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        positions, indices = zip(*self.rows(step), strict=True)
        samples = []
        with seeded_reads() as seed_generators:
            for position, index in zip(positions, indices, strict=True):
                seed_generators(self.seed, position)
                samples.append(read_row(self.dataset, index, self.fields, self.dtype))
        for index, sample in zip(indices, samples, strict=True):
            check_alike(self.dataset, indices[0], samples[0], index, sample)
        return {field: torch.stack([sample[field] for sample in samples]) for field in samples[0]}

    def _order_of_epoch(self, epoch: int) -> Tensor | range:
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(fold(self.seed, epoch))
        return torch.randperm(self.num_rows, generator=generator)


def checksum(batch: Mapping[str, Tensor]) -> int:
    """A hash of a batch's field names, dtypes, shapes and contents: 0 to 2^63 - 2."""
    digest = hashlib.blake2b(digest_size=8)
    for field, tensor in sorted(batch.items()):
        digest.update(f"{field} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") % (2**63 - 1)


def batches_of(config: Any, dataset: Any, dp: int = 1, dp_rank: int = 0) -> Batches:
    """The rows of replica `dp_rank` of `dp` as a configuration orders them; of the defaults, the whole global batch."""
    return Batches(
        dataset,
        global_batch_size=config.train.global_batch_size,
        dp=dp,
        dp_rank=dp_rank,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        fields=config.data.fields,
        dtype=DTYPES[config.precision],
    )
