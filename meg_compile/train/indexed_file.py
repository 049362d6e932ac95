"""Token files as Megatron-LM's: PREFIX.bin holds the tokens of all documents, PREFIX.idx says where each one lies.

The index is little-endian: the magic, uint64 version, uint8 code of the tokens' dtype, uint64 number of sequences,
uint64 number of document indices; then of each sequence its length in tokens (int32) and the byte at which it starts
(int64), and for each document the sequence at which it starts, with the number of sequences at the end (int64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

from meg_compile.errors import Fault, Refused

MAGIC, VERSION, HEADER = b"MMIDIDX\x00\x00", 1, struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {numpy.dtype(name): code for code, name in DTYPES.items()}
_AT_ONCE = 2**20


def fitting_dtype(vocab_size: int) -> numpy.dtype:
    """In which tokens below `vocab_size` are written: uint16 where that is under 65,500, else int32."""
    return numpy.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedFile:
    """Documents of tokens, mapped into memory, so that the processes of a machine share them.

    tokens:   those of all documents, one after another [n].
    lengths:  tokens of each sequence [s], int32.
    documents: the sequence at which each document starts, and `s` at the end [d + 1], int64.

    Refused, under `key`: a file that is missing, of another format, cut or longer than its index says.
    """

    def __init__(self, prefix: str, key: str = "data.path"):
        self.prefix, self._key = prefix, key
        index = self._bytes(".idx")
        if len(index) < HEADER.size or bytes(index[:9]) != MAGIC:
            raise self._refused(".idx", f"is no index of tokens: it does not start with {MAGIC!r}")
        _, version, code, num_sequences, num_indices = HEADER.unpack(bytes(index[: HEADER.size]))
        if version != VERSION:
            raise self._refused(".idx", f"has version {version}, and {VERSION} is understood")
        if code not in DTYPES or DTYPES[code][1] == "f":
            raise self._refused(".idx", f"has tokens of dtype code {code}, and there are 1 to 5 and 8 for integers")
        self.dtype = numpy.dtype(DTYPES[code])
        sizes = (HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices)
        self._check_size(
            ".idx", len(index), sum(sizes), f"{num_sequences} sequences and {num_indices} document indices"
        )
        at = [sum(sizes[: i + 1]) for i in range(4)]
        self.lengths = index[at[0] : at[1]].view("<i4")
        pointers, self.documents = index[at[1] : at[2]].view("<i8"), index[at[2] : at[3]].view("<i8")
        num_tokens = self._check_sequences(pointers)
        data = self._bytes(".bin")
        self._check_size(".bin", len(data), num_tokens * self.dtype.itemsize, f"{num_tokens} tokens of {self.dtype}")
        self.tokens = data.view(self.dtype)
        self._pointers = pointers

    def starts_of(self, sequences: numpy.ndarray) -> numpy.ndarray:
        """The token at which each of some sequences starts; the number of tokens for the one after the last."""
        found = numpy.full(len(sequences), len(self.tokens), numpy.int64)
        inside = sequences < len(self.lengths)
        found[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return found

    def documents_within(self, first: int, end: int) -> numpy.ndarray:
        """The token at which each document starts that starts with a sequence from `first` to `end`, in order."""
        low = numpy.searchsorted(self.documents, first)
        return self.starts_of(self.documents[low : numpy.searchsorted(self.documents, end, side="right")])

    def _check_sequences(self, pointers: numpy.ndarray) -> int:
        """The number of tokens, after a check that sequences follow one another and documents are made of them."""
        at = 0
        for first in range(0, len(self.lengths), _AT_ONCE):
            lengths = self.lengths[first : first + _AT_ONCE].astype(numpy.int64)
            ends = at + numpy.cumsum(lengths)
            follows = pointers[first : first + _AT_ONCE] == (ends - lengths) * self.dtype.itemsize
            if lengths.min() < 0 or not follows.all():
                wrong = first + int(numpy.argmin(follows & (lengths >= 0)))
                raise self._refused(".idx", f"sequence {wrong} does not start where the one before it ends")
            at = int(ends[-1])
        documents = self.documents
        rises = len(documents) and documents[0] == 0 and bool((documents[1:] >= documents[:-1]).all())
        if not rises or documents[-1] != len(self.lengths):
            raise self._refused(".idx", f"its document indices do not go from 0 to its {len(self.lengths)} sequences")
        return at

    def _bytes(self, suffix: str) -> numpy.ndarray:
        path = self.prefix + suffix
        try:
            return numpy.memmap(path, numpy.uint8, "r") if os.path.getsize(path) else numpy.empty(0, numpy.uint8)
        except OSError as error:
            raise self._refused(suffix, f"cannot be read ({error.strerror or error})") from error

    def _check_size(self, suffix: str, size: int, wanted: int, what: str) -> None:
        if size != wanted:
            problem = (
                f"has {size} bytes, and {what} take {wanted}: it is {'cut' if size < wanted else 'of another file'}"
            )
            raise self._refused(suffix, problem)

    def _refused(self, suffix: str, problem: str) -> Refused:
        fix = "give the path of a pair without .bin and .idx, as `python -m meg_compile.tokenize` writes it"
        return Refused(Fault(self._key, self.prefix, f"{self.prefix}{suffix} {problem}", fix))


class IndexedWriter:
    """A context that takes one document at a time and leaves PREFIX.bin and PREFIX.idx.

    Both appear under their names when they are complete; after an exception neither does.
    """

    def __init__(self, prefix: str, dtype: numpy.dtype):
        self.dtype = numpy.dtype(dtype)
        self.paths = [Path(prefix + suffix) for suffix in (".bin", ".idx")]
        self.partial = [path.with_name(path.name + ".partial") for path in self.paths]
        self.lengths: list[int] = []

    def __enter__(self) -> IndexedWriter:
        self.paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._data = self.partial[0].open("wb")
        return self

    def add(self, tokens: Sequence[int]) -> None:
        """A document, of one sequence."""
        self._data.write(numpy.asarray(tokens, self.dtype).data)
        self.lengths.append(len(tokens))

    def __exit__(self, kind: object, *_: object) -> None:
        self._data.close()
        try:
            if kind is None:
                self._write_index()
                for partial, path in zip(self.partial, self.paths, strict=True):
                    os.replace(partial, path)
        finally:
            for partial in self.partial:
                partial.unlink(missing_ok=True)

    def _write_index(self) -> None:
        num = len(self.lengths)
        lengths = numpy.array(self.lengths, numpy.int64)
        with self.partial[1].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], num, num + 1))
            file.write(lengths.astype("<i4").data)
            file.write(((numpy.cumsum(lengths) - lengths) * self.dtype.itemsize).astype("<i8").data)
            file.write(numpy.arange(num + 1, dtype="<i8").data)
