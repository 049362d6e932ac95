"""Which rows a replica reads at which step.

A run reads one sequence of rows: epoch after epoch, each all rows of the dataset in an order that depends on the
dataset's length, the seed, `shuffle` and the epoch alone. A step takes the next ones, as many as its global batch has,
so every plan trains on the same global batches, and a run that goes on with another batch size reads on where it was.
A batch lies in one epoch: where less than one is left, those rows are passed over (with `shuffle` they are others in
each epoch). Of a global batch of G rows, replica d reads the d-th contiguous G / dp.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meg_compile.errors import Fault, Refused
from meg_compile.runtime.watch import progress
from meg_compile.train.rows import check_alike, fold, num_rows, read_row, seeded_reads

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Batches:
    """`batches[step]`: the rows that replica `dp_rank` of `dp` reads at a global step, field -> tensor [G / dp, ...].

    The dataset is map-style; what its rows may be is said at `read_row`. Each row is read with the global generators
    of torch, random and numpy seeded from (seed, position in the run), and they get their states back afterwards. So a
    dataset that draws from them gives the same row to every rank that reads that position, and another row at every
    other position.

    ramp: {start, increment, rows} of a batch that grows to `global_batch_size`, as `batch_size` says.
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
        ramp: Mapping[str, int] | None = None,
    ):
        assert global_batch_size % dp == 0 and 0 <= dp_rank < dp
        self.num_rows = num_rows(dataset)
        if self.num_rows < global_batch_size:
            problem = f"the dataset ({type(dataset).__name__}) has {self.num_rows} rows, less than one global batch"
            fix = f"use at most {self.num_rows}, or more data"
            raise Refused(Fault("train.global_batch_size", global_batch_size, problem, fix))
        self.dataset, self.fields, self.dtype = dataset, fields, dtype
        self.global_batch_size, self.ramp = global_batch_size, ramp
        self.dp, self.dp_rank, self.seed, self.shuffle = dp, dp_rank, seed, shuffle
        self._order = lru_cache(maxsize=1)(self._order_of_epoch)
        self.resume(0, 0)

    def resume(self, step: int, consumed: int) -> None:
        """Let `step` be the one before which so many rows of the run were consumed, whatever the batches before it."""
        self._first = self._last = (step, consumed)

    def consumed(self, step: int) -> int:
        """Rows of the run that are read or passed over before `step`."""
        known, consumed = self._last if self._last[0] <= step else self._first
        assert known <= step, f"this run begins at step {known}"
        for _ in range(known, step):
            consumed = sum(self._span(consumed))
        self._last = (step, consumed)
        return consumed

    def span(self, step: int) -> tuple[int, int]:
        """(position in the run of the first row, number of rows) of the global batch of `step`."""
        return self._span(self.consumed(step))

    def _span(self, consumed: int) -> tuple[int, int]:
        size = batch_size(consumed, self.global_batch_size, self.ramp)
        left = -consumed % self.num_rows or self.num_rows
        return (consumed if size <= left else consumed + left), size

    def rows(self, step: int) -> list[tuple[int, int]]:
        """(position in the run, index in the dataset) of each row that this replica reads at `step`."""
        first, size = self.span(step)
        epoch, in_epoch = divmod(first, self.num_rows)
        order, share = self._order(epoch), size // self.dp
        offsets = range(self.dp_rank * share, (self.dp_rank + 1) * share)
        return [(first + offset, int(order[in_epoch + offset])) for offset in offsets]

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return read_rows(self.dataset, self.rows(step), self.seed, self.fields, self.dtype)

    def _order_of_epoch(self, epoch: int) -> Tensor | range:
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(fold(self.seed, epoch))
        return torch.randperm(self.num_rows, generator=generator)


def batch_size(consumed: int, full: int, ramp: Mapping[str, int] | None) -> int:
    """Rows of the global batch after so many consumed ones, as Megatron-LM's --rampup-batch-size has it.

    From ramp["start"] it grows by ramp["increment"] at a time, in equal parts of the first ramp["rows"], to `full`.
    """
    if ramp is None or consumed >= ramp["rows"]:
        return full
    steps = (full - ramp["start"]) // ramp["increment"]
    return ramp["start"] + consumed * steps // ramp["rows"] * ramp["increment"]


def read_rows(
    dataset, rows: Sequence[tuple[int, int]], seed: int, fields: Sequence[str] | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Rows (position, index) of a dataset as field -> tensor [rows, ...]; a row's position seeds the generators."""
    samples = []
    with seeded_reads() as seed_generators:
        for position, index in rows:
            progress()
            seed_generators(seed, position)
            samples.append(read_row(dataset, index, fields, dtype))
    for (_, index), sample in zip(rows, samples, strict=True):
        check_alike(dataset, rows[0][1], samples[0], index, sample)
    return {field: torch.stack([sample[field] for sample in samples]) for field in samples[0]}


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
        ramp=config.train.batch_ramp,
    )
