"""`python -m meg_compile.tokenize INPUT... --output PREFIX`: texts become PREFIX.bin and PREFIX.idx (`data=indexed`).

An input whose name ends in .jsonl holds a document a line, as an object with its text under `--field`; any other is one
document. Documents are written as they are read, and the files appear when they are complete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from meg_compile.errors import Fault, Refused
from meg_compile.train.indexed_file import IndexedWriter, fitting_dtype
from meg_compile.train.tokenizer import END, load_tokenizer

AT_ONCE = 256  # documents that the tokenizer works on in parallel


class Bytes:
    """Each byte is a token; 256 ends a document."""

    vocab_size, end = 256, 256

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class Learned:
    """A tokenizer from a file; `end` is its token after a document."""

    def __init__(self, path: str, eod: str):
        self.tokenizer = load_tokenizer(path, "--tokenizer")
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.end = self.tokenizer.token_to_id(eod)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for inputs that cannot be read, with no file left."""
    parser = argparse.ArgumentParser("meg_compile.tokenize", description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a .jsonl file, or a text that is one document")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--tokenizer", metavar="FILE", help="as data.tokenizer; without it every byte is a token")
    parser.add_argument("--field", default="text", help="of each line of a .jsonl; text if left out")
    parser.add_argument("--append-eod", action="store_true", help="end every document with --eod")
    parser.add_argument("--eod", default=END, metavar="TOKEN", help=f"{END} if left out; of bytes it is 256")
    options = parser.parse_args(argv)
    try:
        with _progress(options.inputs) as advance:
            said = write(advance=advance, **vars(options))
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        print(Refused(Fault("--output", options.output, problem, "choose another place")), file=sys.stderr)
        return 2
    print(said)
    return 0


def write(
    inputs: Sequence[str],
    output: str,
    tokenizer: str | None,
    field: str,
    append_eod: bool,
    eod: str,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Writes the two files; says what is in them. advance: is told of bytes that are done.

    Refused: a tokenizer or an input that cannot be read, a line that is no object with text, named by its number, and
    inputs without a single token.
    """
    encoder = Learned(tokenizer, eod) if tokenizer else Bytes()
    if append_eod and encoder.end is None:
        problem = f"the tokenizer has no {eod} to end documents with"
        raise Refused(Fault("--append-eod", None, problem, "name its own token by --eod, or leave both out"))
    num_tokens, num_empty = 0, 0
    size = max(encoder.vocab_size, encoder.end + 1) if append_eod else encoder.vocab_size
    with IndexedWriter(output, fitting_dtype(size)) as writer:
        for batch in _batches(_documents(inputs, field)):
            for ids in encoder.encode([text for text, _ in batch]):
                num_empty += not ids
                if ids:
                    writer.add([*ids, encoder.end] if append_eod else ids)
                    num_tokens += writer.lengths[-1]
            advance(sum(num_bytes for _, num_bytes in batch))
        if not num_tokens:
            raise Refused(Fault("INPUT", " ".join(inputs), "there is no text in it", "give a text"))
    said = f"{output}: {len(writer.lengths):,} documents, {num_tokens:,} tokens of {writer.dtype}, below {size}"
    return said + (f"; {num_empty:,} without text left out" if num_empty else "")


def _documents(inputs: Sequence[str], field: str) -> Iterator[tuple[str, int]]:
    """(text, bytes) of each document."""
    for path in inputs:
        with _readable(path):
            if not path.endswith(".jsonl"):
                data = Path(path).read_bytes()
                yield _decoded(data, path), len(data)
                continue
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _text(line, f"{path}:{number}", field), len(line)


def _text(line: bytes, where: str, field: str) -> str:
    try:
        value = json.loads(_decoded(line, where))
    except ValueError as error:
        raise Refused(Fault(where, None, f"is no JSON ({error})", "write an object a line")) from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        has = f"has {', '.join(map(str, value)) or 'no fields'}" if isinstance(value, dict) else "is no object"
        problem = f"holds no text under {field!r}: it {has}"
        raise Refused(Fault(where, None, problem, "name the field that holds it by --field"))
    return value[field]


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start})"
        raise Refused(Fault(where, None, problem, "write it as UTF-8")) from error


def _batches(documents: Iterator[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    while batch := list(islice(documents, AT_ONCE)):
        yield batch


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise Refused(Fault(path, None, problem, "name a file that can be read")) from error


@contextmanager
def _progress(inputs: Sequence[str]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of the inputs, on stderr where that is a terminal."""
    total = sum(Path(path).stat().st_size for path in inputs if Path(path).is_file())
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("tokenize", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


if __name__ == "__main__":
    sys.exit(main())
