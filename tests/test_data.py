"""Text rows, the order of rows, and what is refused about a dataset."""

import random
from pydoc_data.topics import topics

import numpy
import pytest
import torch
from models import FixedRows, RandomRows, fixed_batch
from torch.utils.data import TensorDataset

from meg_compile.errors import Refused
from meg_compile.train.batches import Batches, checksum
from meg_compile.train.data import TextRows
from meg_compile.train.rows import example


class Rows(torch.utils.data.Dataset):
    """A dataset whose row i is `row(i)`."""

    def __init__(self, row, num: int = 8):
        self.row, self.num = row, num

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        return self.row(i)


# ------------------------------------------------------------------------------------------------ text


def test_default_text_is_pythons_documentation():
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    rows = TextRows(seq_len=128)
    assert rows.vocab_size == 256
    assert len(rows) == (len(text) - 1) // 128 > 3000
    tokens = [int(token) for row in (rows[0], rows[1]) for token in row["input_ids"]]
    assert bytes(tokens) == text[:256]


def test_labels_are_the_next_tokens_across_rows(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh")
    rows = TextRows(seq_len=3, path=str(tmp_path / "text"))
    as_text = [
        tuple(bytes(row[field].tolist()) for field in ("input_ids", "labels"))
        for row in map(rows.__getitem__, range(2))
    ]
    assert len(rows) == 2
    assert as_text == [(b"abc", b"bcd"), (b"def", b"efg")]
    assert rows[0]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError):
        rows[2]


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_tokenizer(tmp_path, tokenizer):
    (tmp_path / "text").write_text("the cat sat the dog sat")
    rows = TextRows(seq_len=2, path=str(tmp_path / "text"), tokenizer=tokenizer)
    assert rows.vocab_size == 4
    assert [row.tolist() for row in (rows[0]["input_ids"], rows[1]["input_ids"], rows[1]["labels"])] == [
        [0, 1],
        [2, 0],
        [0, 3],
    ]


@pytest.mark.parametrize(
    ("content", "seq_len", "with_tokenizer", "key", "words"),
    [
        (None, 4, False, "data.path", "cannot be read (No such file or directory)"),
        (b"", 4, False, "data.path", "0 tokens make no row of 4"),
        (
            b"abcd",
            4,
            False,
            "data.path",
            "4 tokens make no row of 4 and the label after it; use a longer text, or data.seq_len=3",
        ),
        (b"\xff\xfe", 1, True, "data.path", "not UTF-8 text (invalid start byte at byte 0)"),
        (b"abcd", 0, False, "data.seq_len", "use 1 or more"),
    ],
)
def test_texts_that_make_no_rows(tmp_path, tokenizer, content, seq_len, with_tokenizer, key, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Refused) as refused:
        TextRows(seq_len, str(path), tokenizer if with_tokenizer else None)
    assert [fault.key for fault in refused.value.faults] == [key]
    assert words in str(refused.value)


def test_a_directory_and_a_broken_tokenizer_are_refused(tmp_path):
    with pytest.raises(Refused, match=r"data\.path=.*Is a directory"):
        TextRows(4, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Refused, match=r"data\.tokenizer=.*is no tokenizer.json"):
        TextRows(4, tokenizer=str(tmp_path / "tokenizer.json"))


# ------------------------------------------------------------------------------------------------ order


def test_rows_in_order_are_the_fixed_batches():
    batches = Batches(FixedRows(), global_batch_size=8)
    for step in range(3):
        ids, labels = fixed_batch(step)
        assert torch.equal(batches[step]["input_ids"], ids)
        assert torch.equal(batches[step]["labels"], labels)
        assert batches[step]["sample_id"].tolist() == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dp", [2, 4])
def test_replicas_cut_the_global_batch_of_one_process(dp, shuffle):
    options = {"global_batch_size": 8, "seed": 3, "shuffle": shuffle}
    whole = Batches(RandomRows(n=20), **options)
    replicas = [Batches(RandomRows(n=20), dp=dp, dp_rank=rank, **options) for rank in range(dp)]
    for step in range(5):
        parts = [replica[step] for replica in replicas]
        for field, expected in whole[step].items():
            assert torch.equal(torch.cat([part[field] for part in parts]), expected)


def test_an_epoch_is_its_whole_global_batches():
    in_order = Batches(FixedRows(steps=1, batch=11), global_batch_size=4)
    assert [in_order[step]["sample_id"].tolist() for step in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
    shuffled = Batches(FixedRows(steps=1, batch=11), global_batch_size=4, shuffle=True, seed=1)
    epochs = [
        [i for step in (2 * epoch, 2 * epoch + 1) for i in shuffled[step]["sample_id"].tolist()] for epoch in (0, 1)
    ]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_order_follows_the_seed():
    def ids(seed):
        return Batches(FixedRows(), global_batch_size=8, shuffle=True, seed=seed)[0]["sample_id"].tolist()

    assert ids(1) == ids(1) != ids(2)


# ------------------------------------------------------------------------------------------------ generators


def test_rows_from_global_generators_do_not_depend_on_the_rank():
    """C04: every rank of a replica reads the same, replicas read different rows, nothing is read twice."""
    checksums = {}
    rows = set()
    for dp_rank in (0, 1):
        for rank_in_replica in (0, 1):
            torch.manual_seed(100 * dp_rank + rank_in_replica)
            batches = Batches(RandomRows(), global_batch_size=8, dp=2, dp_rank=dp_rank, seed=7)
            for step in range(5):
                checksums[dp_rank, rank_in_replica, step] = checksum(batches[step])
                rows |= {tuple(row) for row in batches[step]["input_ids"].tolist()}
    assert all(checksums[dp_rank, 0, step] == checksums[dp_rank, 1, step] for dp_rank in (0, 1) for step in range(5))
    assert len(set(checksums.values())) == 10
    assert len(rows) == 40


def test_all_three_global_generators_are_seeded_and_put_back():
    def draw(_):
        return {"x": torch.rand(1), "y": random.random(), "z": numpy.random.rand()}

    def following():
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    def seed_all():
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    seed_all()
    undisturbed = following()
    seed_all()
    first = Batches(Rows(draw), global_batch_size=4)[0]
    assert following() == undisturbed
    again = Batches(Rows(draw), global_batch_size=4)[0]
    for field in "xyz":
        assert torch.equal(first[field], again[field])
        assert len(set(first[field].flatten().tolist())) == 4


# ------------------------------------------------------------------------------------------------ samples


def test_pairs_numbers_and_arrays_become_fields():
    pairs = TensorDataset(torch.arange(8.0, dtype=torch.float64).view(4, 2), torch.arange(4, dtype=torch.int32))
    batch = Batches(pairs, global_batch_size=2)[1]
    assert {field: (tensor.dtype, tensor.tolist()) for field, tensor in batch.items()} == {
        "input_ids": (torch.float32, [[4, 5], [6, 7]]),
        "labels": (torch.int64, [2, 3]),
    }
    assert Batches(pairs, global_batch_size=2, dtype=torch.float64)[0]["input_ids"].dtype == torch.float64
    mixed = Batches(Rows(lambda i: {"a": numpy.array([i], numpy.uint16), "b": i > 3, "c": 0.5}), global_batch_size=8)[0]
    assert [tensor.dtype for tensor in mixed.values()] == [torch.int64, torch.bool, torch.float32]


def test_fields_select():
    assert list(Batches(FixedRows(), global_batch_size=8, fields=["labels", "input_ids"])[0]) == [
        "labels",
        "input_ids",
    ]


def test_example_is_one_micro_batch():
    inputs = example(FixedRows(), 3, ["input_ids", "labels"])
    assert {field: (tensor.shape, tensor.dtype) for field, tensor in inputs.items()} == {
        "input_ids": ((3, 12), torch.int64),
        "labels": ((3, 12), torch.int64),
    }


def ragged(i):
    return {"ids": torch.zeros(12 if i != 5 else 11), "labels": torch.zeros(12)}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (
            Rows(ragged),
            {},
            r"field 'ids' of row 5 is float32\[11\], that of row 0 is float32\[12\]; pad or cut",
        ),
        (Rows(lambda i: {"ids": "text"}), {}, "field 'ids' of row 0 is a str, not a tensor; leave it out"),
        (Rows(lambda i: {"ids": None}), {}, "field 'ids' of row 0 is a NoneType"),
        (Rows(lambda i: torch.zeros(3)), {}, "row 0 is a Tensor; yield a dict of tensors, or a pair"),
        (Rows(lambda i: {"a" if i < 2 else "b": 0}), {}, "row 2 has the fields b, row 0 has a"),
        (
            Rows(lambda i: {"input_ids": 0}),
            {"fields": ["inputs_id"]},
            r"data.fields=\['inputs_id'\].*mean input_ids\?",
        ),
        (Rows(lambda i: {"ids": 0}, num=5), {}, "train.global_batch_size=8: .*has 5 rows.*use at most 5"),
        (iter(()), {}, "not map-style; give it __len__ and __getitem__"),
    ],
)
def test_datasets_that_cannot_be_trained_on(dataset, options, message):
    with pytest.raises(Refused, match=message):
        Batches(dataset, global_batch_size=8, **options)[0]


def test_checksum_sees_names_shapes_types_and_contents():
    zeros = torch.zeros(2, 3)
    batches = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(3, 2)},
        {"a": zeros.int()},
        {"a": torch.eye(3)[:2]},
        {"a": zeros, "b": zeros},
        {"a": torch.zeros(2, 3, dtype=torch.bool)},
        {"a": torch.zeros(0)},
    ]
    checksums = [checksum(batch) for batch in batches]
    assert len(set(checksums)) == len(batches)
    assert all(0 <= number < 2**63 - 1 for number in checksums)
    assert checksum({"a": zeros, "b": zeros}) == checksum({"b": zeros, "a": zeros})
