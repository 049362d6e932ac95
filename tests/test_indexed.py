"""Token files byte by byte, rows of them, blends, splits, the ends of documents, and the command that writes them."""

import json
import re
import struct

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meg_compile.errors import Refused
from meg_compile.tokenize import main
from meg_compile.train.blend import blend, read_paths
from meg_compile.train.data import TextRows
from meg_compile.train.indexed import IndexedRows
from meg_compile.train.indexed_file import IndexedFile, IndexedWriter, fitting_dtype
from meg_compile.train.split import cut

DOCUMENTS = [[1, 2, 3], [4, 5], [600]]
BIN = struct.pack("<6H", 1, 2, 3, 4, 5, 600)
IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<Q", 1)  # version
    + struct.pack("<B", 8)  # uint16
    + struct.pack("<QQ", 3, 4)  # sequences, document indices
    + struct.pack("<3i", 3, 2, 1)  # lengths
    + struct.pack("<3q", 0, 6, 10)  # byte offsets
    + struct.pack("<4q", 0, 1, 2, 3)  # documents
)


def written(prefix, documents, dtype="<u2"):
    with IndexedWriter(str(prefix), numpy.dtype(dtype)) as writer:
        for document in documents:
            writer.add(document)
    return str(prefix)


def tokens_of(dataset):
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


# ------------------------------------------------------------------------------------------------ the format


def test_the_files_are_megatrons_byte_by_byte(tmp_path):
    written(tmp_path / "a", DOCUMENTS)
    assert (tmp_path / "a.bin").read_bytes() == BIN
    assert (tmp_path / "a.idx").read_bytes() == IDX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert fitting_dtype(65499) == numpy.uint16 and fitting_dtype(65500) == numpy.int32


def test_documents_of_several_sequences_are_read(tmp_path):
    """As sentences are written: documents of two sequences, none, and one."""
    index = IDX[:26] + struct.pack("<Q", 4) + IDX[34:-32] + struct.pack("<4q", 0, 2, 2, 3)
    (tmp_path / "a.bin").write_bytes(BIN)
    (tmp_path / "a.idx").write_bytes(index)
    file = IndexedFile(str(tmp_path / "a"))
    assert file.documents_within(0, 3).tolist() == [0, 5, 5, 6]
    assert file.documents_within(1, 2).tolist() == [5, 5] and file.starts_of(numpy.array([1, 3])).tolist() == [3, 6]
    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 600]


@pytest.mark.parametrize("dtype", ["<u1", "<i1", "<i2", "<i4", "<i8", "<u2"])
def test_what_is_written_is_read(tmp_path, dtype):
    documents = [[7] * n for n in (5, 1, 9)]
    file = IndexedFile(written(tmp_path / "a", documents, dtype))
    assert (file.dtype, file.documents.tolist(), file.lengths.tolist()) == (numpy.dtype(dtype), [0, 1, 2, 3], [5, 1, 9])
    assert file.tokens.tolist() == [7] * 15


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        (".idx", lambda b: b"PK" + b[2:], r"a\.idx is no index of tokens"),
        (".idx", lambda b: b[:20], r"a\.idx is no index of tokens"),
        (".idx", lambda b: b[:9] + b"\2" + b[10:], "has version 2, and 1 is understood"),
        (".idx", lambda b: b[:17] + b"\7" + b[18:], "dtype code 7"),
        (".idx", lambda b: b[:-1], r"a\.idx has 101 bytes, and 3 sequences and 4 document indices take 102: it is cut"),
        (".idx", lambda b: b + b"\0", "has 103 bytes, .*of another file"),
        (".idx", lambda b: b.replace(struct.pack("<q", 10), struct.pack("<q", 8)), "sequence 2 does not start where"),
        (".idx", lambda b: b[:-8] + struct.pack("<q", 2), "do not go from 0 to its 3 sequences"),
        (".bin", lambda b: b[:-2], r"a\.bin has 10 bytes, and 6 tokens of uint16 take 12: it is cut"),
        (".bin", lambda b: b"", r"a\.bin has 0 bytes"),
        (".bin", None, r"a\.bin cannot be read \(No such file"),
        (".idx", None, r"a\.idx cannot be read \(No such file"),
    ],
)
def test_a_cut_or_foreign_file_is_refused(tmp_path, suffix, change, said):
    path = tmp_path / f"a{suffix}"
    prefix = written(tmp_path / "a", DOCUMENTS)
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Refused, match=rf"data\.path=.*/a: .*{said}"):
        IndexedFile(prefix)


def test_what_fails_leaves_no_file(tmp_path):
    with pytest.raises(OverflowError), IndexedWriter(str(tmp_path / "a"), numpy.dtype("<u2")) as writer:
        writer.add([1])
        writer.add([70000])
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ rows


def test_rows_run_on_over_documents(tmp_path):
    prefix = written(tmp_path / "a", [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])
    rows = IndexedRows(3, prefix, split=[1])
    assert tokens_of(rows) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [row["labels"].tolist() for row in map(rows.__getitem__, range(3))] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(IndexError):
        rows[3]


def test_the_ends_of_documents(tmp_path):
    prefix = written(tmp_path / "a", [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])
    labels = IndexedRows(5, prefix, split=[1], documents="labels")[0]
    assert list(labels) == ["input_ids", "labels"]
    assert labels["labels"].tolist() == [1, 2, -100, -100, 5]
    apart = IndexedRows(4, prefix, split=[1], documents="attention")
    assert {field: value.tolist() for field, value in apart[0].items()} == {
        "input_ids": [0, 1, 2, 3],
        "labels": [1, 2, -100, -100],  # 4, the token after the row, begins a document
        "document_ids": [0, 0, 0, 1],
        "position_ids": [0, 1, 2, 0],
    }
    assert apart[1]["document_ids"].tolist() == [0, 0, 0, 0] and apart[1]["position_ids"].tolist() == [0, 1, 2, 3]
    assert IndexedRows.lengths(4, documents="attention", path="x") == {name: 4 for name in apart[0]}


@pytest.mark.parametrize(
    ("split", "num", "ends"),
    [("969,30,1", 1000, (969, 999, 1000)), ("969,30,1", 20, (19, 20, 20)), ([1, 1], 5, (2, 5, 5)), ("8", 3, (3, 3, 3))],
)
def test_splits_are_megatrons(split, num, ends):
    assert [cut(split, part, num) for part in ("train", "valid", "test")] == list(zip((0, *ends), ends, strict=False))


@pytest.mark.parametrize(
    ("split", "num", "ends"),
    [("0.7,0.2,0.1", 5, (4, 5, 5)), ("0.833,0.767,0.064", 13, (7, 12, 13)), ("0.770,0.055,0.375", 8, (5, 5, 8))],
)
def test_splits_at_a_half_are_megatrons(split, num, ends):
    """As megatron-core 0.16.1 rounds 3.5, 12.5 and 5.5, which its sums of the ratios miss by the last bit."""
    assert [cut(split, part, num) for part in ("train", "valid", "test")] == list(zip((0, *ends), ends, strict=False))


def test_parts_are_cut_between_sentences(tmp_path):
    """Documents of four, none and two sequences, in halves as megatron-core 0.16.1's GPTDataset has them: 3 and 3."""
    (tmp_path / "a.bin").write_bytes(bytes(range(12)))
    lengths, pointers = struct.pack("<6i", *[2] * 6), struct.pack("<6q", *range(0, 12, 2))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 6, 4)
    (tmp_path / "a.idx").write_bytes(head + lengths + pointers + struct.pack("<4q", 0, 4, 4, 6))
    prefix = str(tmp_path / "a")
    train, valid = (IndexedRows(5, prefix, "1,1", part, "attention")[0] for part in ("train", "valid"))
    assert train["input_ids"].tolist() == [0, 1, 2, 3, 4] and train["labels"].tolist() == [1, 2, 3, 4, 5]
    assert valid["input_ids"].tolist() == [6, 7, 8, 9, 10] and valid["labels"].tolist() == [7, -100, 9, 10, 11]
    assert valid["document_ids"].tolist() == [0, 0, 1, 1, 1] and valid["position_ids"].tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("split", ["", "1,x", [0, 0], [1, -1], [1, 1, 1, 1], 5, [float("inf")]])
def test_what_is_no_split_is_refused(split):
    with pytest.raises(Refused, match=r"data\.split=.* up to three ratios"):
        cut(split, "train", 10)


def test_parts_share_no_document(tmp_path):
    prefix = written(tmp_path / "a", [[i] * 10 for i in range(10)])
    parts = [IndexedRows(3, prefix, "6,2,2", part) for part in ("train", "valid", "test")]
    assert [{t for row in tokens_of(rows) for t in row} for rows in parts] == [{0, 1, 2, 3, 4, 5}, {6, 7}, {8, 9}]
    with pytest.raises(
        Refused, match=r"data\.split=.*: 0 of the 10 sequences of .*/a are for test.*give the part more"
    ):
        IndexedRows(3, prefix, "8,2", "test")


def test_a_text_has_parts_too(tmp_path):
    (tmp_path / "t").write_bytes(bytes(range(100)))
    path = str(tmp_path / "t")
    assert len(TextRows(9, path)) == 11
    assert [TextRows(9, path, split=[8, 2], part=part)[0]["input_ids"][0].item() for part in ("train", "valid")] == [
        0,
        80,
    ]
    with pytest.raises(Refused, match=r"data\.split=null: the valid part's 0 tokens make no row of 9.*\[969,30,1\]"):
        TextRows(9, path, part="valid")


# ------------------------------------------------------------------------------------------------ blends


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5), st.integers(1, 300))
def test_running_shares_follow_the_weights(weights, num):
    sets, before = blend(weights, num)
    assert len(sets) == num
    for i, weight in enumerate(weights):
        share, mine = weight / sum(weights), sets == i
        counts = mine.cumsum()
        assert before[mine].tolist() == list(range(counts[-1]))
        error = numpy.abs(counts - share * numpy.arange(1, num + 1)).max()
        assert error <= (1 + len(weights) * share) / 2 + 1e-9  # all rounded to a whole row, at a time off by k / 2 rows


def test_a_blend_starts_again_what_runs_out(tmp_path):
    a = written(tmp_path / "a", [list(range(9))])  # 4 rows of 2
    b = written(tmp_path / "b", [list(range(100, 117))])  # 8 rows
    rows = IndexedRows(2, [0.5, a, 0.5, b], split=[1])
    assert len(rows) == 12 and rows.epochs == [1.5, 0.75]
    firsts = [row[0] for row in tokens_of(rows)]
    assert [t for t in firsts if t < 100] == [0, 2, 4, 6, 0, 2]
    assert [t for t in firsts if t >= 100] == [100, 102, 104, 106, 108, 110]
    assert tokens_of(IndexedRows(2, [{"path": a, "weight": 3}, {"path": b, "weight": 3}], [1])) == tokens_of(rows)
    assert sorted(row[0] for row in tokens_of(IndexedRows(2, [a, b], [1]))) == [0, 2, 4, 6, *range(100, 115, 2)]


@pytest.mark.parametrize("path", [[], [0.3], [0.3, "a", "b"], ["a", 0.3], [0.3, 0.7], [{"path": "a"}], [0, "a"], None])
def test_what_is_no_blend_is_refused(path):
    with pytest.raises(Refused, match=r"data\.path="):
        read_paths(path)


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE of 300 tokens: a folder with vocab.json, merges.txt, and whole/tokenizer.json."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("bpe")
    trained = ByteLevelBPETokenizer()
    text = ["the cat sat on the mat, and then the cat sat on the hat"] * 20
    trained.train_from_iterator(text, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    (folder / "whole").mkdir()
    trained.save(str(folder / "whole" / "tokenizer.json"))
    return folder


def test_a_tokenizer_in_any_form_is_the_same(tmp_path, bpe):
    (tmp_path / "t").write_text("the cat sat<|endoftext|>  on the\n\nhat — é")
    forms = [bpe, bpe / "vocab.json", bpe / "whole", bpe / "whole" / "tokenizer.json"]
    rows = [TextRows(8, str(tmp_path / "t"), str(form)) for form in forms]
    assert all(tokens_of(one) == tokens_of(rows[0]) and one.vocab_size == rows[0].vocab_size > 256 for one in rows)
    assert 0 in rows[0].tokens and len(rows[0].tokens) < 30
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"data\.tokenizer=.*holds no tokenizer\.json"):
        TextRows(8, tokenizer=str(tmp_path / "empty"))
    (tmp_path / "vocab.json").write_text("[")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(Refused, match=r"data\.tokenizer=.*no vocab\.json with merges\.txt"):
        TextRows(8, tokenizer=str(tmp_path / "vocab.json"))


def test_texts_and_lines_become_documents(tmp_path, bpe, capsys):
    (tmp_path / "a.txt").write_text("the cat\n")
    lines = [{"body": "sat on", "text": 1}, {"body": ""}, {"body": "hat\nmat"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    options = ["--output", str(tmp_path / "out" / "all"), "--field", "body", "--append-eod"]
    assert main([*inputs, *options]) == 0
    assert "3 documents, 24 tokens of uint16, below 257; 1 without text left out" in capsys.readouterr().out
    file = IndexedFile(str(tmp_path / "out" / "all"))
    assert file.tokens.tolist() == [*b"the cat\n", 256, *b"sat on", 256, *b"hat\nmat", 256]
    assert main([*inputs, *options, "--tokenizer", str(bpe)]) == 0
    file = IndexedFile(str(tmp_path / "out" / "all"))
    assert len(file.lengths) == 3 and (file.tokens == 0).sum() == 3 and len(file.tokens) < 24
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["all.bin", "all.idx"]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b'{"text": "a"}\n{"text": 3}\n', [], r"in\.jsonl:2: holds no text under 'text': it has text"),
        (
            b'{"text": "a"}\n\n{"body": "b"}\n',
            [],
            r"in\.jsonl:3: .*it has body; name the field that holds it by --field",
        ),
        (b"[1]\n", [], r"in\.jsonl:1: .*is no object"),
        (b'{"text": "a"}\n{"text": "b"\n', [], r"in\.jsonl:2: is no JSON"),
        (b'{"text": "a"}\n\xff\n', [], r"in\.jsonl:2: is not UTF-8 text"),
        (b'{"text": ""}\n', [], "there is no text in it"),
        (None, [], r"in\.jsonl: cannot be read"),
        (b'{"text": "a"}\n', ["--tokenizer", "nowhere"], r"--tokenizer=nowhere: the file cannot be read"),
    ],
)
def test_bad_inputs_are_refused_and_leave_nothing(tmp_path, capsys, content, options, said):
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path), "--output", str(tmp_path / "out" / "a"), *options]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not list((tmp_path / "out").glob("*"))


def test_an_end_that_the_tokenizer_lacks_is_refused(tmp_path, bpe, capsys):
    options = ["--output", str(tmp_path / "a"), "--tokenizer", str(bpe), "--append-eod", "--eod", "</s>"]
    assert main([__file__, *options]) == 2
    assert "has no </s> to end documents with" in capsys.readouterr().err
