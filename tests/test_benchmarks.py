"""The benchmarks run, and their contenders compute the same losses; what they measure is not tested."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import compile_time
from benchmarks.contests import KEYS
from benchmarks.model import Size


@pytest.mark.dist
def test_every_pair_is_measured(tmp_path, capfd):
    benchmarks.main(["--sizes", "4x128", "--steps", "2", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    printed = capfd.readouterr().out
    assert [row["pair"] for row in rows] == list(KEYS)
    for row in rows:
        low, high = row["quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["met"] == (row["ratio"] <= row["bar"])
        assert row["title"] in printed


def test_compile_time_is_a_markdown_table(capsys):
    compile_time.main(["--layers", "2"])
    header, ruler, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == ruler.count("|") == row.count("|")
    assert row.startswith("| 2 | 0.4 B |")


@pytest.mark.parametrize("text", ["4", "4x", "4x100", "3x256"])
def test_sizes_that_cannot_work_are_refused(text):
    with pytest.raises(ValueError):
        Size.parse(text)
