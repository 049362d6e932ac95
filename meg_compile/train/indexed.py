"""Rows of tokens from Megatron-LM's token files."""

from __future__ import annotations

from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from meg_compile.errors import Fault, Refused
from meg_compile.train.blend import blend, read_paths
from meg_compile.train.indexed_file import IndexedFile
from meg_compile.train.split import Part, cut

Documents = Literal["ignore", "labels", "attention"]
APART = ("document_ids", "position_ids")
"""The fields by which a model keeps the documents of a row apart."""


class IndexedRows(Dataset):
    """Rows of `seq_len` tokens that run on over the documents of `path`, each with the next token as its label.

    Row i is {"input_ids": tokens[i * seq_len : (i + 1) * seq_len], "labels": the same one token later}, both int64
    [seq_len], of the tokens of all documents of a part. What is left at the end and makes no whole row is not used.

    path: PREFIX of a PREFIX.bin and PREFIX.idx, or a blend of several: [0.3, a, 0.7, b], [{path: a, weight: 0.3}, ...],
        or [a, b], weighted by their rows. A blend has as many rows as its datasets together, in an order that keeps to
        the weights, so that an epoch of it holds `epochs[i]` of dataset i: one of which less is left starts again.
    split, part: the sequences of each dataset, cut in order by these ratios into train, valid and test. A document is
        one, unless Megatron-LM wrote it in sentences: then two parts may share it, as there.
    documents: where one ends inside a row.
        ignore     nothing; the next one's first token is predicted too.
        labels     its first token is not predicted: that label is -100.
        attention  and the row has `document_ids`, counted from 0, and `position_ids`, which start again with each
                   document, both int64 [seq_len].
    Refused: files that are not whole, a part without a row.
    """

    def __init__(
        self,
        seq_len: int,
        path: Any,
        split: Any = "969,30,1",
        part: Part = "train",
        documents: Documents = "ignore",
    ):
        if seq_len < 1:
            raise Refused(Fault("data.seq_len", seq_len, "a row holds at least one token", "use 1 or more"))
        named = read_paths(path)
        self.parts = [_Part(IndexedFile(prefix), split, part, seq_len, documents) for prefix, _ in named]
        sizes = [len(rows) for rows in self.parts]
        self.num_rows = sum(sizes)
        weights = [size if weight is None else weight for size, (_, weight) in zip(sizes, named, strict=True)]
        self.epochs = [w / sum(weights) * self.num_rows / size for w, size in zip(weights, sizes, strict=True)]
        self._order = blend(weights, self.num_rows) if len(self.parts) > 1 else None
        self.needed_fields = {"documents": APART} if documents == "attention" else {}

    def __len__(self) -> int:
        return self.num_rows

    @property
    def vocab_size(self) -> int:
        """Rows that a model needs for the first 16 million tokens of each dataset."""
        return 1 + max(int(part.tokens[: 2**24].max()) for part in self.parts)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        if self._order is None:
            return self.parts[0][i]
        rows = self.parts[self._order[0][i]]
        return rows[int(self._order[1][i]) % len(rows)]

    @classmethod
    def lengths(cls, seq_len: int, documents: str = "ignore", **_: Any) -> dict[str, int]:
        """The tokens of each field of a row, known without a file."""
        return dict.fromkeys(("input_ids", "labels", *(APART if documents == "attention" else ())), seq_len)


class _Part:
    """The rows of one file's part."""

    def __init__(self, file: IndexedFile, split: Any, part: str, seq_len: int, documents: str):
        first, end = cut(split, part, len(file.lengths))
        start, stop = (int(at) for at in file.starts_of(numpy.array([first, end])))
        self.tokens = file.tokens[start:stop]
        self.bounds = file.documents_within(first, end) - start if documents != "ignore" else None
        self.seq_len, self.documents = seq_len, documents
        if len(self) < 1:
            problem = f"{end - first} of the {len(file.lengths)} sequences of {file.prefix} are for {part}, and their "
            problem += f"{stop - start} tokens make no row of {seq_len} and the label after it"
            raise Refused(Fault("data.split", split, problem, "give the part more, or use more documents"))

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        first, size = i * self.seq_len, self.seq_len
        window = torch.from_numpy(self.tokens[first : first + size + 1].astype(numpy.int64))
        row = {"input_ids": window[:-1], "labels": window[1:]}
        if self.bounds is None:
            return row
        begin, end = numpy.searchsorted(self.bounds, [first, first + size], side="right")
        starts = torch.from_numpy(self.bounds[begin:end] - first)  # in 1 to seq_len; twice after an empty document
        row["labels"] = row["labels"].index_fill(0, starts - 1, -100)
        if self.documents == "attention":
            is_start = torch.zeros(size + 1, dtype=torch.int64).index_fill(0, starts, 1)[:size]
            places = torch.arange(size)
            row["document_ids"] = is_start.cumsum(0)
            row["position_ids"] = places - (places * is_start).cummax(0).values
        return row
