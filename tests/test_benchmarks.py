"""The benchmarks run, and their contenders compute the same losses; what they measure is not tested."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import compile_time, gpu_check
from benchmarks.contests import KEYS
from benchmarks.gpu.case import Case
from benchmarks.gpu.speed import CONTENDERS, TITLES, flops
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch, on itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_a_gpu_is_to_show_holds_on_the_cpu_too(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert gpu_check.main(["--dry", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert [(row["precision"], row["compiled"], row["ok"]) for row in figures["equality"]] == [
        (precision, compiled, True) for precision in ("fp32", "bf16") for compiled in (False, True)
    ]
    assert all(row["ok"] for row in figures["memory"])
    assert [row["contender"] for row in figures["speed"]] == list(CONTENDERS)
    assert all(row["tokens_per_s"] > 0 for row in figures["speed"])
    printed = capsys.readouterr().out
    assert all(title in printed for title in TITLES.values())


def test_memory_that_is_not_as_predicted_fails(monkeypatch, tmp_path):
    figures = dict.fromkeys(("states", "held", "held_predicted", "peak", "peak_predicted"), 1)
    monkeypatch.setattr(gpu_check, "memory", lambda case, *_: {"case": case.name, "ok": case.dropout == 0} | figures)
    assert gpu_check.main(["--dry", "--only", "memory", "--json", str(tmp_path / "figures.json")]) == 1


def test_model_flops_of_the_published_formula():
    case = Case("175B", layers=96, hidden=12288, heads=96, seq=2048, vocab=51200, rows=1536)
    layers, hidden, tokens = 96, 12288, 1536 * 2048
    products = 6 * tokens * (12 * layers * hidden**2 + 51200 * hidden)
    attention = 3 * layers * tokens * 2 * hidden * 2048  # both products of a query with half of the keys
    assert flops(case) == pytest.approx(products + attention)
