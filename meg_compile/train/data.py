"""Text as rows of tokens: the default dataset."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meg_compile.errors import Fault, Refused
from meg_compile.train.split import Part, cut
from meg_compile.train.tokenizer import load_tokenizer


class TextRows(Dataset):
    """A text cut into rows of `seq_len` tokens that follow one another, each with the token after it as its label.

    Row i is {"input_ids": tokens[i * seq_len : (i + 1) * seq_len], "labels": the same window one token later}, both
    int64 [seq_len]. What is left at the end and makes no whole row is not used.

    path: a file, read as it is; None is the documentation text that comes with Python (about 465 KB of English).
    tokenizer: a `tokenizer.json` of the tokenizers library, a `vocab.json` with its `merges.txt`, or their folder;
        None makes each byte a token (`vocab_size` 256).
    split, part: the tokens, cut in order by these ratios into train, valid and test; None takes all for training.
    Refused: a file that cannot be read, a text that makes no row.
    """

    least = 1, "a row holds at least one token"

    def __init__(
        self,
        seq_len: int,
        path: str | None = None,
        tokenizer: str | None = None,
        split: Any = None,
        part: Part = "train",
    ):
        least, why = self.least
        if seq_len < least:
            raise Refused(Fault("data.seq_len", seq_len, why, f"use {least} or more"))
        self.seq_len = seq_len
        if tokenizer is not None:
            self.vocab_size, self.tokens = _tokenized(path, tokenizer)
        elif path is not None:
            self.vocab_size, self.tokens = 256, _bytes_of(path)
        else:
            self.vocab_size, self.tokens = (
                256,
                torch.frombuffer(bytearray(_documentation()), dtype=torch.uint8),
            )
        first, end = cut([1] if split is None else split, part, len(self.tokens))
        self.tokens = self.tokens[first:end]
        if len(self) < 1 and part != "train":
            problem = f"the {part} part's {len(self.tokens)} tokens make no row of {seq_len} and the label after it"
            raise Refused(Fault("data.split", split or "null", problem, "give it more, as data.split=[969,30,1]"))
        if len(self) < 1:
            problem = f"the text's {len(self.tokens)} tokens make no row of {seq_len} and the label after it"
            shorter = f", or data.seq_len={len(self.tokens) - 1} at most" if len(self.tokens) > 1 else ""
            raise Refused(Fault("data.path", path or "null", problem, f"use a longer text{shorter}"))

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        window = self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}

    @classmethod
    def lengths(cls, seq_len: int, **_: Any) -> dict[str, int]:
        """The tokens of each field of a row, known without a text."""
        return {"input_ids": seq_len, "labels": seq_len}


class TextHalves(TextRows):
    """The same windows for an encoder and a decoder: the first half is read, the second one is to be written.

    Of a window w of `seq_len` tokens with h = seq_len // 2 the row is {"input_ids": w[:h], "decoder_input_ids":
    w[h - 1 : -1], "labels": w[h:]}, so the decoder starts from the last token that the encoder reads.
    """

    least = 2, "each half holds at least one token"

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        window, half = super().__getitem__(i)["input_ids"], self.seq_len // 2
        return {"input_ids": window[:half], "decoder_input_ids": window[half - 1 : -1], "labels": window[half:]}

    @classmethod
    def lengths(cls, seq_len: int, **_: Any) -> dict[str, int]:
        half = seq_len // 2
        return {"input_ids": half, "decoder_input_ids": seq_len - half, "labels": seq_len - half}


def _documentation() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _bytes_of(path: str) -> Tensor:
    """The file's bytes [n] uint8, mapped into memory, so that the ranks of one machine share them."""
    with _readable("data.path", path), open(path, "rb") as file:
        num_bytes = file.seek(0, 2)
    return torch.from_file(path, size=num_bytes, dtype=torch.uint8) if num_bytes else torch.empty(0, dtype=torch.uint8)


def _tokenized(path: str | None, tokenizer: str) -> tuple[int, Tensor]:
    """(size of the vocabulary, the text's tokens [n] int32)."""
    encoder = load_tokenizer(tokenizer)
    text = _documentation()
    if path is not None:
        with _readable("data.path", path):
            text = Path(path).read_bytes()
    try:
        ids = encoder.encode(text.decode(), add_special_tokens=False).ids
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
        raise Refused(Fault("data.path", path, problem, "leave data.tokenizer out to read bytes")) from error
    return encoder.get_vocab_size(), torch.tensor(ids, dtype=torch.int32)


@contextmanager
def _readable(key: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror or error})"
        raise Refused(Fault(key, path, problem, "name a file that can be read")) from error
