"""Reading single rows of a user's dataset, repeatably on every rank."""

import hashlib
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from torch import Tensor

from meg_compile.errors import Fault, Refused, nearest

Row = dict[str, Tensor]


def num_rows(dataset) -> int:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise refused(dataset, "it is not map-style", "give it __len__ and __getitem__")
    try:
        return len(dataset)
    except Exception as error:
        raise refused(dataset, f"its __len__ raised {_said(error)}", "make len(dataset) work") from error


def read_row(dataset, index: int, fields: Sequence[str] | None, dtype: torch.dtype) -> Row:
    """Row `index` as field -> tensor: only `fields` where they are given.

    A pair (inputs, labels) becomes the fields `input_ids` and `labels`. Numbers and numpy arrays count as tensors.
    Integers are widened to int64, floating-point fields get `dtype`.
    """
    try:
        row = dataset[index]
    except Refused:
        raise
    except Exception as error:
        raise refused(dataset, f"reading row {index} raised {_said(error)}", f"make dataset[{index}] work") from None
    if isinstance(row, (tuple, list)) and len(row) == 2:
        row = {"input_ids": row[0], "labels": row[1]}
    if not isinstance(row, Mapping):
        problem = f"row {index} is a {type(row).__name__}"
        raise refused(dataset, problem, "yield a dict of tensors, or a pair (inputs, labels)")
    if missing := [field for field in fields or () if field not in row]:
        guess = nearest(missing[0], row)
        fix = f"did you mean {guess}?" if guess else f"choose from {', '.join(row)}"
        raise Refused(Fault("data.fields", list(fields or ()), f"row {index} has no field {missing[0]!r}", fix))
    return {field: _tensor(dataset, index, field, row[field], dtype) for field in fields or row}


def example(
    dataset, micro_batch_size: int, fields: Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> Row:
    """One micro-batch as the compiler wants to see it: the dataset's first row, `micro_batch_size` times."""
    if num_rows(dataset) == 0:
        raise refused(dataset, "it has no rows", "use more data")
    with seeded_reads() as seed_generators:
        seed_generators(0, 0)
        row = read_row(dataset, 0, fields, dtype)
    return {field: torch.stack([tensor] * micro_batch_size) for field, tensor in row.items()}


def check_alike(dataset, first: int, expected: Row, index: int, row: Row) -> None:
    """Refused where rows `first` and `index` cannot be stacked, naming the field and the row."""
    if row.keys() != expected.keys():
        problem = f"row {index} has the fields {', '.join(row)}, row {first} has {', '.join(expected)}"
        raise refused(dataset, problem, "yield the same fields in every row")
    for field, tensor in row.items():
        here, there = _describe(tensor), _describe(expected[field])
        if here != there:
            problem = f"field {field!r} of row {index} is {here}, that of row {first} is {there}"
            raise refused(dataset, problem, "pad or cut the rows to one shape")


@contextmanager
def seeded_reads() -> Iterator[Callable[..., None]]:
    """Yields `seed_generators(*numbers)`, which seeds the global generators of torch (CPU), random and numpy.

    At the end the three get back the states they had.
    """
    torch_state, random_state, numpy_state = (
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state(),
    )

    def seed_generators(*numbers: int) -> None:
        seed = fold(*numbers)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    try:
        yield seed_generators
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(random_state)
        numpy.random.set_state(numpy_state)


def fold(*numbers: int) -> int:
    """One seed, below 2^63, from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def refused(dataset, problem: str, fix: str) -> Refused:
    return Refused(Fault("data._target_", type(dataset).__name__, problem, fix))


def _said(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _tensor(dataset, index: int, field: str, value: object, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, (Tensor, numpy.ndarray, numpy.generic, bool, int, float)):
        problem = f"field {field!r} of row {index} is a {type(value).__name__}, not a tensor"
        raise refused(dataset, problem, "leave it out by listing the others in data.fields")
    tensor = torch.as_tensor(value)
    if tensor.dtype == torch.bool or tensor.is_complex():
        return tensor
    return tensor.to(dtype if tensor.is_floating_point() else torch.int64)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
