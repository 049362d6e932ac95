"""Checkpoints that are damaged, unfinished or of something else are named and never taken; a full disk is an error."""

import errno
import json
import shutil
from pathlib import Path

import models
import pytest
import torch
from checkpoints import ADAM, PLANS, run
from training import config, on_ranks

import meg_compile.checkpoint.saver as saver
from meg_compile.checkpoint.folder import damage, name_of, prune, steps_in
from meg_compile.checkpoint.resume import look_at, resume_faults
from meg_compile.errors import MegError, Refused

ONE_LAYER = {"factory": lambda: models.TinyGPT(layers=1)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """step_1 and step_2 of a run on two tp ranks."""
    folder = tmp_path_factory.mktemp("saved")
    settings = ADAM | {"train__steps": 2, "checkpoint__every": 1, "checkpoint__dir": str(folder / "ck")}
    run(folder / "run", **ONE_LAYER, **settings, **PLANS["tp2"])
    return folder / "ck"


def cut(path):
    (path / "rank_1.safetensors").write_bytes((path / "rank_1.safetensors").read_bytes()[:-1])


def flip(path, name="rank_0.safetensors"):
    content = bytearray((path / name).read_bytes())
    content[-9] ^= 1
    (path / name).write_bytes(content)


def flip_index(path):
    flip(path, "index.json")


def leave_out(path):
    (path / "rank_0.safetensors").unlink()


def no_manifest(path):
    (path / "manifest.json").unlink()


def half_a_manifest(path):
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:40])


def outside(path):
    """An index that leads out of the directory, with a manifest that knows it."""
    from meg_compile.checkpoint.files import facts

    index = (path / "index.json").read_text().replace("rank_0.safetensors", "../x/rank_0.safetensors")
    (path / "index.json").write_text(index)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["index.json"] = facts(path / "index.json")
    (path / "manifest.json").write_text(json.dumps(manifest))


def unfinished(path):
    path.rename(f"{path}.part")


DAMAGE = {
    cut: "rank_1.safetensors is damaged: ",
    flip: "rank_0.safetensors is damaged: its bytes are not those that were written",
    flip_index: "index.json is damaged",
    leave_out: "rank_0.safetensors is missing",
    no_manifest: "it has no manifest.json, so it was not finished",
    half_a_manifest: "manifest.json is damaged",
    outside: "index.json names ../x/rank_0.safetensors, of which the manifest says nothing",
    unfinished: "it was not finished",
}


@pytest.mark.parametrize("how", DAMAGE, ids=lambda how: how.__name__)
def test_a_damaged_one_is_passed_over_or_refused(how, saved, tmp_path, capsys):
    directory = shutil.copytree(saved, tmp_path / "ck")
    how(directory / "step_2")
    settings = ADAM | {"train__steps": 3, "checkpoint__dir": str(directory)}
    if how is not unfinished:
        path = {"checkpoint__resume": str(directory / "step_2")}
        with pytest.raises(MegError, match=f"step_2: {DAMAGE[how]}"):
            run(tmp_path / "named", **ONE_LAYER, **settings, **path)
    result, _ = run(tmp_path / "auto", **ONE_LAYER, **settings)
    out = capsys.readouterr().out
    assert f"passed over: {DAMAGE[how]}" in out and f"checkpoint: goes on from {directory / 'step_1'}\n" in out
    assert result["resumed_step"] == 1 and (directory / "step_3").is_dir()
    assert not list(directory.glob("*.part"))


def half(file, _):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file, _):
    file.write_bytes(b"")


def one_bit(file, _):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def gone(file, _):
    file.unlink()


def of_the_other_step(file, other):
    shutil.copy(other / file.name, file)


FILES = ("manifest.json", "index.json", "state.json", "rank_0.safetensors", "rank_1.safetensors")


WAYS = [(how, name) for how in (half, empty, one_bit, gone, of_the_other_step) for name in FILES]
WAYS.remove((of_the_other_step, "index.json"))  # which is the same


@pytest.mark.parametrize(("how", "name"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_every_damaged_file_is_named(how, name, saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "ck") / "step_2"
    assert not damage(path, look_at(path).files, FILES[1:])
    how(path / name, saved / "step_1")
    try:
        said = "; ".join(damage(path, look_at(path).files, FILES[1:]))
    except ValueError as error:
        said = str(error)
    named = [file for file in FILES if file in said]
    assert name in named if name != "manifest.json" else said


def test_where_all_are_damaged_nothing_starts(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "ck")
    flip(directory / "step_1")
    leave_out(directory / "step_2")
    with pytest.raises(
        MegError, match=r"no checkpoint is good: step_2: rank_0\S+ is missing; step_1: rank_0\S+ is damaged"
    ):
        run(tmp_path / "run", **ONE_LAYER, **ADAM, checkpoint__dir=str(directory), train__steps=3)


def test_only_tensors_and_json_are_read(saved, tmp_path, monkeypatch):
    assert {path.suffix for path in saved.rglob("*.*")} == {".safetensors", ".json"}

    def unpickle(*_, **__):
        raise AssertionError("something was unpickled from a file")

    monkeypatch.setattr(torch, "load", unpickle)
    monkeypatch.setattr("pickle.load", unpickle)
    directory = shutil.copytree(saved, tmp_path / "ck")
    assert run(tmp_path / "run", **ONE_LAYER, **ADAM, checkpoint__dir=str(directory), train__steps=3)[0]["steps"] == 1


def refused(settings, factory=ONE_LAYER["factory"]):
    """What is said before a process starts."""
    (faults,) = on_ranks(settings, lambda program, *_: resume_faults(settings, program), factory)
    return "; ".join(map(str, faults))


class Wider(models.TinyGPT):
    def __init__(self):
        super().__init__(layers=1, d=32)


@pytest.mark.parametrize(
    ("changes", "factory", "words"),
    [
        ({}, lambda: models.TinyGPT(layers=2), ["model.h.1.n1.weight is not in it", "; and 6 more; "]),
        ({}, Wider, ["model.wpe.weight is [32, 16] in it, and [32, 32] here"]),
        ({}, lambda: models.ZeroHeadGPT(vocab=64, layers=1), ["model.lm_head.weight is not in it"]),
        ({"precision": "fp32"}, ONE_LAYER["factory"], ["model.wpe.weight is F64 in it, and F32 here"]),
        ({"train__steps": 1}, ONE_LAYER["factory"], ["train.steps=1: ", "is of step 2 already", "train.steps=2"]),
        ({"checkpoint__resume": None}, ONE_LAYER["factory"], ["checkpoint.dir=", "holds step_1, step_2 already"]),
        ({"checkpoint__resume": "step_1"}, ONE_LAYER["factory"], ["checkpoint.dir=", "holds step_2 already"]),
        (
            {"checkpoint__resume": "step_7"},
            ONE_LAYER["factory"],
            ["it has no manifest.json", "there are step_1, step_2"],
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else None,
)
def test_what_does_not_fit_is_refused_before_a_process_starts(changes, factory, words, saved):
    if name := changes.get("checkpoint__resume"):
        changes = changes | {"checkpoint__resume": str(saved / name)}
    settings = config(**{"train__steps": 3, "checkpoint__dir": str(saved)} | changes)
    said = refused(settings, factory)
    assert all(word in said for word in words), said


def test_what_fits_is_not_refused(saved, tmp_path):
    assert not refused(config(train__steps=3, checkpoint__dir=str(saved)))
    assert not refused(config(train__steps=3, checkpoint__dir=str(tmp_path / "none")))
    assert not refused(config(train__steps=3, checkpoint__resume=str(saved / "step_1")))


def test_another_optimizer_is_refused(saved, tmp_path):
    path = {"checkpoint__resume": str(saved / "step_2")}
    with pytest.raises(MegError, match="it has the state of AdamW, and this run's optimizer is SGD"):
        run(tmp_path / "run", **ONE_LAYER, train__steps=3, **path)
    with pytest.raises(Refused, match=r"model\.h\.1\.n1\.weight is not in it"):
        run(tmp_path / "run", lambda: models.TinyGPT(layers=2), train__steps=3, **path)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_checkpoint_before(background, tmp_path, monkeypatch):
    write = saver.write_tensors

    def full(path, tensors):
        if path == tmp_path / "ck" / "step_2.part" / "rank_1.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(saver, "write_tensors", full)
    settings = ADAM | {"train__steps": 4, "checkpoint__every": 1, "checkpoint__background": background}
    settings |= {"checkpoint__dir": str(tmp_path / "ck"), **PLANS["tp2"]}
    with pytest.raises(MegError) as raised:
        run(tmp_path / "run", **ONE_LAYER, **settings)
    said = "step_2 cannot be written: No space left on device; the last one there is step_1"
    assert str(raised.value) == f"checkpoint.dir={tmp_path / 'ck'}: {said}"
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step_1"]
    monkeypatch.undo()
    assert run(tmp_path / "run", **ONE_LAYER, **settings)[0]["resumed_step"] == 1


def test_a_directory_that_cannot_be_made_fails_on_every_rank(tmp_path):
    (tmp_path / "file").touch()
    settings = ADAM | {"train__steps": 1, "checkpoint__dir": str(tmp_path / "file" / "ck"), **PLANS["tp2"]}
    with pytest.raises(MegError, match="step_1 cannot be written: Not a directory; there is none before it"):
        run(tmp_path / "run", **ONE_LAYER, **settings)


def test_what_stays(tmp_path):
    for step in range(1, 11):
        (tmp_path / name_of(step)).mkdir()
        if step != 10:  # damaged, and newer than where the run goes on from
            prune(tmp_path, step, keep=2, keep_every=4)
    assert steps_in(tmp_path) == [4, 8, 9, 10]


def test_settings_that_cannot_work(tmp_path):
    from meg_compile.config.rules import Here, _checkpoint

    def said(**changes):
        values = {"dir": None, "every": None, "signal": "SIGUSR1"} | changes
        return str([str(f) for f in _checkpoint({f"checkpoint.{k}": v for k, v in values.items()}, Here())])

    (tmp_path / "file").touch()
    assert "checkpoint.every=5: there is no directory to save into" in said(every=5)
    assert "is a file, not a directory" in said(dir=str(tmp_path / "file"))
    assert "checkpoint.signal=USR1: no such signal" in said(signal="USR1")
    assert "checkpoint.signal=SIGKILL: it means something else" in said(signal="SIGKILL")
    assert said(dir=str(Path.cwd()), every=5) == "[]"
