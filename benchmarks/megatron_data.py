"""Are token files, rows, splits and blends megatron-core's? `python -m benchmarks.megatron_data`

Writes token files with Megatron-LM's own builder and with ours, reads each with the other, and compares bytes,
sequences, lengths and documents; then rows, labels, losses left out, positions and attention with its GPTDataset, on
every part of a split; then where splits cut, and how much of a blend comes from which dataset. Needs megatron-core, of
which the data alone are used: `pip install --no-deps megatron-core`. Exits with 1 and what differs, with 2 without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from meg_compile.train.blend import blend, read_paths
from meg_compile.train.indexed import IndexedRows
from meg_compile.train.indexed_file import IndexedFile, IndexedWriter, fitting_dtype
from meg_compile.train.split import PARTS, cut

Document = list[list[int]]
"""The tokens of its sequences."""
Differ = Callable[[str, Any, Any], None]
"""Takes what is compared, what was found and what megatron-core has."""
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
SEQ_LEN, END = 16, 7
SPLIT = "6,3,2"


def corpora() -> Iterator[tuple[str, str, list[Document]]]:
    """(what, dtype, documents) of each file."""
    draw = random.Random(0)
    for dtype in DTYPES:
        limit = min(int(numpy.iinfo(dtype).max), 2**31 - 1)
        lengths = [draw.randrange(1, 40) for _ in range(60)]
        yield dtype, dtype, [[[draw.randrange(limit + 1) for _ in range(n)]] for n in lengths]
    yield "a token over 65535", "int32", [[[65535, 65536, 2**31 - 1]], [[0]]]
    yield "empty documents", "uint16", [[[]], [[1, 2]], [[]], [[]], [[3]], [[]]]
    yield "documents without a sequence", "uint16", [[], [[1], [2, 3]], [], [], [[4]], []]
    yield "many sequences a document", "int32", [[[i, j] * j for j in range(i % 9)] for i in range(300)]
    yield "one long document", "uint16", [[list(range(2**16)) * 4]]


def theirs_written(prefix: str, dtype: str, documents: list[Document], by_item: bool) -> None:
    """With Megatron-LM's builder: a sequence at a time, or a document at a time."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(numpy, dtype))
    for document in documents:
        if by_item:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64))
            builder.end_document()
        else:
            builder.add_document([*chain(*document)], [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def ours_written(prefix: str, dtype: str, documents: list[Document]) -> None:
    with IndexedWriter(prefix, numpy.dtype(dtype).newbyteorder("<")) as writer:
        for document in documents:
            writer.add([*chain(*document)])


def compare_files(folder: Path, differ: Differ) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    for number, (what, dtype, documents) in enumerate(corpora()):
        prefixes = [str(folder / f"{number}_{how}") for how in ("by_item", "by_document", "ours")]
        for prefix, by_item in zip(prefixes, (True, False), strict=False):
            theirs_written(prefix, dtype, documents, by_item)
        single = all(len(document) == 1 for document in documents)
        if single:
            ours_written(prefixes[2], dtype, documents)
            for suffix in (".bin", ".idx"):
                right, found = (Path(prefix + suffix).read_bytes() for prefix in prefixes[1:])
                differ(f"{what}: the bytes of our {suffix}", found == right, True)
        for prefix in prefixes[: 3 if single else 2]:
            right, found = IndexedDataset(prefix), IndexedFile(prefix)
            differ(f"{what}: dtype", found.dtype, numpy.dtype(right.index.dtype))
            differ(f"{what}: lengths", found.lengths.tolist(), right.sequence_lengths.tolist())
            differ(f"{what}: documents", found.documents.tolist(), right.document_indices.tolist())
            ends = [*found.lengths.cumsum().tolist()]
            sequences = [found.tokens[e - n : e].tobytes() for e, n in zip(ends, found.lengths.tolist(), strict=True)]
            differ(f"{what}: sequences", sequences, [right[i].tobytes() for i in range(len(right))])
            differ(f"{what}: as they were given", [right[i].tolist() for i in range(len(right))], [*chain(*documents)])
    for size in (1, 256, 65499, 65500, 65536, 100000):
        differ(f"dtype for {size} tokens", fitting_dtype(size), numpy.dtype(DType.optimal_dtype(size)))


def gpt_datasets(prefix: str, split: str) -> list[Any]:
    """Megatron-LM's dataset of each part, one epoch of it; None for an empty one."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer: Any = SimpleNamespace(eod=END, pad=-1, vocab_size=2**17, unique_identifiers={})
    options = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    settings = GPTDatasetConfig(1234, SEQ_LEN, ([prefix], None), split=split, tokenizer=tokenizer, **options)
    return BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, settings).build()


def compare_rows(folder: Path, differ: Differ) -> None:
    """Its sequences come in a random order, as do its rows: ours are of a file that has them in that order."""
    draw = random.Random(1)
    for what, most in (("one sequence a document", 1), ("several sequences a document", 5)):
        prefix = str(folder / f"rows_{most}")
        documents = [
            [[draw.randrange(8, 70000) for _ in range(draw.randrange(1, 30))] for _ in range(draw.randint(1, most))]
            for _ in range(120)
        ]
        for document in documents:
            document[-1][-1] = END
        theirs_written(prefix, "int32", documents, by_item=False)
        file = IndexedFile(prefix)
        for part, right in zip(PARTS, gpt_datasets(prefix, SPLIT), strict=True):
            first, end = cut(SPLIT, part, len(file.lengths))
            differ(f"{what}, {part}: its sequences", (first, end), (int(right.indices[0]), int(right.indices[-1]) + 1))
            mine = IndexedRows(SEQ_LEN, prefix, SPLIT, part)
            tokens = [t for i in range(first, end) for t in right.dataset[i].tolist()]
            run = [t for i in range(len(mine)) for t in mine[i]["input_ids"].tolist()]
            differ(f"{what}, {part}: the number of rows", len(mine), len(right))
            differ(f"{what}, {part}: tokens in order", run, tokens[: len(run)])
            if most == 1:
                ordered = f"{prefix}_{part}"
                ours_written(ordered, "int32", [[right.dataset[i].tolist()] for i in right.document_index])
                compare_with_gpt(IndexedRows(SEQ_LEN, ordered, "1", documents="attention"), right, part, differ)


def compare_with_gpt(mine: IndexedRows, right: Any, part: str, differ: Differ) -> None:
    for i, place in enumerate(right.shuffle_index):
        row, wanted = mine[int(place)], right[i]
        counted = row["labels"] != -100
        apart = row["document_ids"][:, None] != row["document_ids"]
        later = torch.ones(SEQ_LEN, SEQ_LEN).triu(1).bool()
        pairs = {
            "tokens": (row["input_ids"], wanted["tokens"]),
            "labels": (row["labels"][counted], wanted["labels"][counted]),
            "losses left out": (counted, wanted["loss_mask"] != 0),
            "positions": (row["position_ids"], wanted["position_ids"]),
            "attention kept out": (apart | later, wanted["attention_mask"][0]),
        }
        for name, (found, expected) in pairs.items():
            differ(f"{part}, row {i}: {name}", found.tolist(), expected.tolist())


def compare_splits(differ: Differ) -> None:
    """Cut as `_build_megatron_dataset_splits` does, of random ratios and of those at which it has to round a half."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    draw = random.Random(2)
    texts = ["969,30,1", "99,1,0", "1", "0,0,1", "0,1", "1,1", ".5,.25,.25", "0.1,0.2,0.7", "1,1,1", "0.7,0.2,0.1"]
    texts += [",".join(str(draw.randrange(1, 101)) for _ in range(draw.randint(1, 3))) for _ in range(1000)]
    texts += [",".join(f"{draw.random():.3f}" for _ in range(3)) for _ in range(1000)]
    for text in texts:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
        for num in (*range(1, 41), *(draw.randrange(10**9) for _ in range(40))):
            for part, bounds in zip(PARTS, matrix, strict=True):
                first, end = cut(text, part, num)
                found = None if first == end else (first, end)
                wanted = bounds and (round(bounds[0] * float(num)), round(bounds[1] * float(num)))
                wanted = None if wanted and wanted[0] == wanted[1] else wanted
                differ(f"split {text} of {num}, {part}", found, wanted)


def compare_blends(differ: Differ) -> int:
    """Shares alone: at any moment each may be ahead of the other by a row a dataset. Returns the most that one was."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import get_blend_from_list, normalize

    draw, most = random.Random(3), 0
    for _ in range(300):
        sizes = [draw.randint(1, 400) for _ in range(draw.randint(2, 8))]
        weighted, num = draw.random() < 0.5, sum(sizes)
        weights = [draw.uniform(0.01, 1) for _ in sizes] if weighted else sizes
        theirs, before = numpy.zeros(num, numpy.int16), numpy.zeros(num, numpy.int64)
        if weighted:
            helpers.build_blending_indices(theirs, before, normalize(weights), len(sizes), num, False)
        else:
            helpers.build_exhaustive_blending_indices(theirs, before, sizes, len(sizes))
        ours, ours_before = blend(weights, num)
        name = f"blend by {[round(w, 4) for w in weights]}"
        for i in range(len(sizes)):
            differ(f"{name}: its rows in order", ours_before[ours == i].tolist(), list(range((ours == i).sum())))
            if not weighted:
                differ(f"{name}: rows of {i} in all", int((ours == i).sum()), int((theirs == i).sum()))
        lead = max(int(numpy.abs((ours == i).cumsum() - (theirs == i).cumsum()).max()) for i in range(len(sizes)))
        differ(f"{name}: off by at most a row a dataset", lead <= len(sizes), True)
        most = max(most, lead)
    for items in (["0.3", "a", "0.7", "b"], ["a", "b"], ["a"], ["30", "x/y", "70", "3z"]):
        names, shares = get_blend_from_list(items) or ([], None)
        differ(f"blend {items}", read_paths(items), list(zip(names, shares or [None] * len(names), strict=True)))
    return most


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_data", description=__doc__)
    parser.parse_args(argv)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        print("megatron-core is not installed: pip install --no-deps megatron-core (0.16.1 was compared)")
        return 2
    warnings.simplefilter("ignore")
    logging.disable()
    different, num = [], 0

    def differ(what: str, found: Any, wanted: Any) -> None:
        nonlocal num
        num += 1
        if found != wanted:
            different.append(f"{what}: {str(found)[:200]}, and megatron-core has {str(wanted)[:200]}")

    with tempfile.TemporaryDirectory() as name:
        compare_files(Path(name), differ)
        compare_rows(Path(name), differ)
        compare_splits(differ)
        lead = compare_blends(differ)
    for line in different[:50]:
        print(line)
    print(f"megatron-core {version('megatron-core')}: of {num} comparisons {len(different)} differ")
    print(f"the order of a blend is our own: of any first rows one dataset had up to {lead} more or less than there")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
