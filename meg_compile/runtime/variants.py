"""Rows of other shapes, and evaluation, on the weights of an executor."""

from __future__ import annotations

from meg_compile.runtime.executor import Executor
from meg_compile.runtime.schedule import Batch


class Variants:
    """Executors on the tensors of one, for rows that its program is not compiled for: each is made when it is first
    asked for."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self._made: dict[tuple, Executor] = {}

    def of(self, batch: Batch, training: bool = False) -> Executor:
        """One for a replica's rows {field: [rows, ...]}; micro-batches are the largest that divide them.

        A collective: all ranks ask for the same shapes, in the same order. MegError as by `Program.variant`.
        """
        program = self.executor.program
        num_rows = len(next(iter(batch.values())))
        size = max(n for n in range(1, program.micro_batch_size + 1) if num_rows % n == 0)
        shapes = tuple((name, rows.shape[1:], rows.dtype) for name, rows in sorted(batch.items()))
        key = training, size, shapes
        if key not in self._made:
            variant = program.variant({name: rows[:size] for name, rows in batch.items()}, training)
            made = Executor(variant, self.executor.groups, self.executor.device, tensors=self.executor.tensors)
            self._made[key] = made
        return self._made[key]
