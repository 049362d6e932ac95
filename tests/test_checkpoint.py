"""Checkpoints: saved under one plan, a run goes on under any other as if it had never stopped."""

import json
from types import SimpleNamespace

import models
import pytest
import torch
from checkpoints import ADAM, PLANS, TERM, run
from safetensors.torch import load_file
from training import config, on_ranks

from meg_compile.axes.layout import Shard
from meg_compile.checkpoint import files
from meg_compile.checkpoint.pieces import held_part
from meg_compile.checkpoint.resume import look_at
from meg_compile.checkpoint.saver import Saver
from meg_compile.checkpoint.state import counters_of, make_moments, take, tensors_of
from meg_compile.checkpoint.storage import Reader
from meg_compile.train.batches import Batches, checksum
from meg_compile.train.step import Trainer

# AdamW, weight decay 0.1, three steps of warm-up and a cosine to 0 at step 10, in one process that is never stopped
C42 = [11.1506565856, 10.5078504749, 10.0282150646, 8.322007175, 7.7634326041]
C42 += [6.9034949545, 7.1041475313, 6.1100808153, 5.990572171, 6.0759155135]
C42_SETTINGS = ADAM | {"optim__schedule": "cosine", "optim__warmup_steps": 3, "optim__betas": [0.9, 0.999]}
CHAIN = ("tp2", "pp2", "tp2_pp2", "vpp2", "dp2_zero3", "tp2_sp", "tp2_pp2_dp2_zero1", "cp2", "dp2_zero2", "one")


def test_a_chain_of_plans_is_one_run(tmp_path):
    """C42: each plan takes one step and hands over to the next. Half of them are stopped by a signal."""
    steps = {"train__steps": 10, **C42_SETTINGS, "checkpoint__dir": str(tmp_path / "ck")}
    for step, plan in enumerate(CHAIN, start=1):
        result, lines = run(tmp_path / str(step), stop_at=step, **steps, **PLANS[plan])
        assert [line["step"] for line in lines] == list(range(1, step + 1))
        assert [line["loss"] for line in lines] == pytest.approx(C42[:step], rel=1e-9)
        assert result["resumed_step"] == (step - 1 or None)
        assert result["checkpoint"] == str(tmp_path / "ck" / f"step_{step}")
        assert (result["status"], result.get("signal")) == (("stopped", TERM) if step < 10 else ("ok", None))
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == ["step_10", "step_9"]


def test_a_padded_vocabulary_changes_plans(tmp_path):
    """C42 with 101 tokens, of which tp=2 pads one: five steps at tp=2, then (1, 2), (2, 2) and (1, 1)."""
    odd = {"factory": lambda: models.TinyGPT(vocab=101), "rows": models.FixedRows(vocab=101)}
    steps = {"train__steps": 10, **C42_SETTINGS}
    _, right = run(tmp_path / "all", **odd, **steps)
    steps["checkpoint__dir"] = str(tmp_path / "ck")
    for stop, plan in ((5, "tp2"), (7, "pp2"), (8, "tp2_pp2"), (10, "one")):
        _, lines = run(tmp_path / plan, stop_at=stop, **odd, **steps, **PLANS[plan])
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in right], rel=1e-9)


class OddGPT(models.TinyGPT):
    """101 words on two ranks, dropout, weights that are not tied."""

    def __init__(self):
        super().__init__(vocab=101, tied=False, p=0.1, layers=2)


MEASURED = ("step_s", "tokens_per_s", "tflops_per_rank", "phase_s", "memory_bytes", "peak_memory_bytes")
ODD = {"factory": OddGPT, "rows": models.FixedRows(vocab=101)}


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("tp2_pp2", {"precision": "fp32", "data__shuffle": True}),
        ("dp2_zero2", {"precision": "bf16"}),
        ("one", {"precision": "fp32", "dropout": "fast"}),
        ("one", {"precision": "fp16", "train__loss_scale": None}),
        ("dp2", {"train__batch_ramp": {"start": 4, "increment": 4, "rows": 30}}),
    ],
    ids=str,
)
def test_the_same_plan_goes_on_to_the_last_bit(plan, changes, tmp_path, monkeypatch):
    """In fp16 the scale starts so high that it falls before and after the checkpoint."""
    monkeypatch.setattr("meg_compile.train.scale.START", 2.0**33)
    settings = {"train__steps": 6, **C42_SETTINGS, **changes, **PLANS[plan]}
    settings |= {"optim__warmup_steps": 1, "train__clip_grad": 1.0}
    _, right = run(tmp_path / "all", **ODD, **settings)
    settings["checkpoint__dir"] = str(tmp_path / "ck")
    run(tmp_path / "start", stop_at=3, **ODD, **settings)
    torch.manual_seed(99)  # the stream of random numbers comes from the checkpoint
    _, lines = run(tmp_path / "rest", **ODD, **settings)
    timeless = [{k: v for k, v in line.items() if k not in MEASURED} for line in (*lines, *right)]
    assert timeless[:6] == timeless[6:]
    if changes.get("precision") == "fp16":
        assert 0 < lines[2]["skipped"] < lines[5]["skipped"]


def test_another_batch_size_reads_on_where_the_run_was(tmp_path):
    """After 3 steps of 8 rows, two of 4 read rows 24 to 31: together the rows of the fourth step of 8."""
    settings = {"train__steps": 5, "checkpoint__dir": str(tmp_path / "ck")}
    run(tmp_path / "start", stop_at=3, **settings)
    _, lines = run(tmp_path / "rest", **settings, train__global_batch_size=4)
    assert [line["num_rows"] for line in lines] == [8, 8, 8, 4, 4]
    rows = Batches(models.FixedRows(), global_batch_size=4)
    rows.resume(3, 24)
    assert [index for step in (3, 4) for _, index in rows.rows(step)] == list(range(24, 32))
    assert [line["rows"] for line in lines[3:]] == [[f"{checksum(rows[step]):016x}"] for step in (3, 4)]


def test_data_of_another_length_is_said(tmp_path, capsys):
    settings = {"train__steps": 2, "checkpoint__dir": str(tmp_path / "ck")}
    run(tmp_path / "start", stop_at=1, **settings)
    assert "rows, and had" not in capsys.readouterr().out
    run(tmp_path / "rest", rows=models.FixedRows(steps=10), **settings)
    assert "the data has 80 rows, and had 160" in capsys.readouterr().out


@pytest.mark.parametrize("plan", ["tp2_pp2_dp2_zero1", "tp2"])
def test_a_checkpoint_holds_whole_tensors_once(plan, tmp_path):
    settings = config(**ADAM, **PLANS[plan])

    def work(program, executor, groups):
        trainer = Trainer(settings, program, executor, groups, ODD["rows"])
        trainer.update(0, trainer.gradients(0).norm)
        saver = Saver(tmp_path, background=False, keep=2, keep_every=None)
        saver.save(1, tensors_of(trainer), {"step": 1})
        return dict(executor.gather("value"))

    right = on_ranks(settings, work, ODD["factory"], ODD["rows"])[0]
    whole, num_files = whole_tensors(tmp_path / "step_1")
    shapes = {name: tuple(tensor.shape) for name, tensor in OddGPT().state_dict().items()}
    assert {n.removeprefix("model."): tuple(t.shape) for n, t in whole.items() if n.startswith("model.")} == shapes
    whats = ("exp_avg", "exp_avg_sq", "step")
    assert {n for n in whole if n.startswith("optim.")} == {f"optim.{n}.{what}" for n in shapes for what in whats}
    for name, tensor in right.items():
        torch.testing.assert_close(whole[f"model.{name}"], tensor, rtol=0, atol=0)
    assert num_files == settings.num_ranks  # replicas share out the writing


def test_moments_change_plans_there_and_back_bit_by_bit(tmp_path):
    """C42: what one plan saved, read by another and saved again without a step, is the same; so also at the end."""

    def saved(plan, start, folder):
        settings = config(**ADAM, **PLANS[plan])

        def work(program, executor, groups):
            trainer = Trainer(settings, program, executor, groups, ODD["rows"])
            if start is None:
                trainer.update(0, trainer.gradients(0).norm)
            else:
                make_moments(trainer)
                found = look_at(start)
                take(trainer, Reader(found.path, found.index), found.state, settings.to_dict())
            saver = Saver(folder, background=False, keep=2, keep_every=None)
            saver.save(1, tensors_of(trainer), counters_of(trainer, 1, settings))
            saver.wait()

        on_ranks(settings, work, ODD["factory"], ODD["rows"])
        return folder / "step_1"

    path = saved("tp2", None, tmp_path / "0")
    first = kept(path)
    assert any(tensor.any() for name, tensor in first.items() if name.endswith("exp_avg_sq"))
    for number, plan in enumerate(("pp2", "tp2_pp2_dp2_zero1", "tp2"), start=1):
        path = saved(plan, path, tmp_path / str(number))
        found = kept(path)
        assert found.keys() == first.keys(), plan
        assert [name for name in first if not torch.equal(found[name], first[name])] == [], plan


def kept(path):
    """All but the random streams, which start anew under another plan."""
    return {name: tensor for name, tensor in whole_tensors(path)[0].items() if name.startswith(("model.", "optim."))}


def whole_tensors(path):
    """The tensors of a checkpoint, each of whose entries was written once, and the number of its files."""
    files, whole = {file.name: load_file(file) for file in path.glob("*.safetensors")}, {}
    for name, entry in json.loads((path / "index.json").read_text()).items():
        whole[name] = torch.full(entry["shape"], torch.nan, dtype=torch.float64)
        written = 0
        for piece in entry["pieces"]:
            key = name if piece["shape"] == entry["shape"] else f"{name}@{','.join(map(str, piece['offset']))}"
            stored = files[piece["file"]][key]
            whole[name][tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True))] = stored
            written += stored.numel()
        assert written == whole[name].numel() and not whole[name].isnan().any(), name
    return whole, len(files)


@pytest.mark.parametrize("first_row", [None, 0, 4, 7])
def test_pieces_of_a_part(first_row):
    """Of 11 rows a rank holds 1 to 3 and 8 to 10, padded to 8, of columns 2 and 5; replicas share these rows."""
    whole = torch.arange(11 * 6.0).view(11, 6)
    shard = Shard((11, 6), (8, 2), ((0, ((1, 3), (8, 3))), (1, ((2, 1), (5, 1)))))
    spec = SimpleNamespace(shape=(11, 6), local_shape=(8, 2), shards=(shard,))
    local = shard.slice(whole)
    mine = local if first_row is None else local[first_row : first_row + 4]
    held = held_part(spec, mine, 0, first_row)
    rows = {None: [1, 2, 3, 8, 9, 10], 0: [1, 2, 3, 8], 4: [9, 10], 7: []}[first_row]
    found = []
    for offset, piece in held.pieces.items():
        assert torch.equal(piece, whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))])
        found += [r for r in range(offset[0], offset[0] + piece.shape[0])] * piece.shape[1]
    assert sorted(found) == sorted(rows * 2)


@pytest.mark.parametrize("box", [(slice(0, 7), slice(0, 5)), (slice(2, 6), slice(1, 3)), (slice(6, 7), slice(0, 5))])
def test_a_part_is_read_block_by_block(box, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 90)  # two rows
    whole = torch.arange(7 * 5.0, dtype=torch.float64).view(7, 5)
    files.write_tensors(tmp_path / "a.safetensors", {"n": torch.tensor(3), "x": whole})
    into, number = torch.zeros_like(whole[box]), torch.tensor(0)
    with files.TensorFile(tmp_path / "a.safetensors") as opened:
        opened.read("x", [axis.start for axis in box], into)
        opened.read("n", [], number)
    assert torch.equal(into, whole[box]) and number == 3
