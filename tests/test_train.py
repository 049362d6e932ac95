"""The training loop on compiled programs: the loss it shows, the rows it reads, the files it writes."""

import io
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import models
import pytest
import reference
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from training import config, on_ranks

from meg_compile.errors import MegError
from meg_compile.models.loss import cross_entropy
from meg_compile.train.log import RunLog
from meg_compile.train.loop import train
from meg_compile.weights import save_file

PLANS = {
    "1": {},
    "tp2": {"plan__tp": 2},
    "pp2": {"plan__pp": 2},
    "dp2": {"plan__dp": 2},
    "tp2_pp2": {"plan__tp": 2, "plan__pp": 2},
    "pp2_dp2": {"plan__pp": 2, "plan__dp": 2},
}


def run_train(settings, run_dir, dataset=None, factory: Callable[[], nn.Module] = models.TinyGPT):
    """The result, after a check that every rank returns the same."""
    dataset = models.FixedRows() if dataset is None else dataset

    def work(program, executor, groups):
        return train(settings, program, executor, groups, dataset, run_dir)

    results = on_ranks(settings, work, factory, dataset)
    assert all(result["loss_last"] == results[0]["loss_last"] for result in results)
    return results[0]


def logged(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("plan", PLANS)
def test_the_shown_and_logged_loss_is_the_loss(tmp_path, capsys, plan):
    """C37, C08: five lines, each once, with the true norm and lr, on the console and in the file."""
    result = run_train(config(**PLANS[plan]), tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    shown = [
        re.match(r"step (\d)/5  loss (\S+)  grad_norm (\S+)  lr (\S+)  tokens/s [\d,]+  TFLOP/s \S+$", line)
        for line in lines
    ]
    assert [match.groups() for match in shown] == [
        (str(step), f"{loss:.4f}", f"{norm:.4f}", "1.0e-01")
        for step, (loss, norm) in enumerate(reference.TINY_GPT, start=1)
    ]
    assert [record["step"] for record in logged(tmp_path)] == [1, 2, 3, 4, 5]
    for record, right in zip(logged(tmp_path), reference.TINY_GPT, strict=True):
        assert (record["loss"], record["grad_norm"]) == pytest.approx(right, rel=1e-9, abs=1e-10)
        assert (record["tokens"], record["lr"]) == (96, 0.1)
        assert record["tokens_per_s"] == pytest.approx(96 / record["step_s"])
        assert len(set(record["rows"])) == PLANS[plan].get("plan__dp", 1)
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert (result["steps"], result["loss_last"]) == (5, logged(tmp_path)[-1]["loss"])
    assert result["num_parameters"] == reference.TINY_GPT_NUM_PARAMETERS
    expected = {"tp2": [7808] * 2, "pp2": [8096, 7616]}  # an even cut, each stage with its copy of the tied weight
    assert result["num_parameters_per_rank"] == expected.get(plan, result["num_parameters_per_rank"])
    assert json.loads(json.dumps(result)) == result


class Uneven(models.FixedRows):
    """Row i of a batch has i % 8 counted labels."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"labels": row["labels"].where(torch.arange(12) < i % 8, -100)}


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("plan", ["1", "dp2"])
def test_the_loss_is_the_mean_over_counted_tokens(tmp_path, plan, micro_batch_size):
    settings = config(train__steps=1, train__micro_batch_size=micro_batch_size, **PLANS[plan])
    result = run_train(settings, tmp_path, Uneven())
    ids, labels = (torch.stack([Uneven()[i][field] for i in range(8)]) for field in ("input_ids", "labels"))
    assert result["loss_first"] == pytest.approx(cross_entropy(reference.build(models.TinyGPT)(ids), labels).item())
    assert result["tokens"] == 28


# ------------------------------------------------------------------------------------------------ data


class OwnRows(models.FixedRows):
    """Rows that depend on the rank, from the third batch on."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"input_ids": (row["input_ids"] + dist.get_rank()) % 64} if i >= 16 else row


@pytest.mark.parametrize(("plan", "replica"), [("tp2", 0), ("pp2_dp2", "0, 1")])
def test_ranks_of_a_replica_that_read_different_rows_stop_the_run(tmp_path, plan, replica):
    message = f"step 3, data OwnRows: the ranks of replica {replica} read different rows"
    with pytest.raises(MegError, match=message):
        run_train(config(**PLANS[plan]), tmp_path, OwnRows())
    assert len(logged(tmp_path)) == 2


def test_replicas_may_read_different_rows(tmp_path):
    assert run_train(config(plan__dp=2), tmp_path, OwnRows())["steps"] == 5


def test_a_batch_without_counted_labels_has_no_loss(tmp_path):
    class Uncounted(models.FixedRows):
        def __getitem__(self, i):
            row = super().__getitem__(i)
            return row | {"labels": torch.full_like(row["labels"], -100)}

    with pytest.raises(MegError, match="step 1, data Uncounted: no label of the global batch counts"):
        run_train(config(), tmp_path, Uncounted())


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    with pytest.raises(MegError, match=r"step 2: the loss is (nan|inf), first in stage 0 .*; lower optim.lr"):
        run_train(config(plan__tp=2, optim__lr=1e200), tmp_path)
    assert len(logged(tmp_path)) == 1


# ------------------------------------------------------------------------------------------------ console


def test_on_a_terminal_there_is_one_bar(tmp_path):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with RunLog(tmp_path, 2, console) as log:
        for step in (1, 2):
            figures = {"loss": 1.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1234.0}
            log.step({"step": step, "tokens": 96, "step_s": 0.1, **figures})
    assert "2/2" in screen.getvalue()
    assert "loss 1.5000  grad_norm 0.5000  lr 1.0e-03  tokens/s 1,234" in screen.getvalue()
    assert "step 1/2" not in screen.getvalue()


# ------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("plan", PLANS)
def test_starting_weights_do_not_depend_on_the_plan(tmp_path, plan):
    """C06: after no steps the exported weights are, bit by bit, those of the plain model."""
    path = tmp_path / "out" / "weights.safetensors"
    settings = config(train__steps=0, train__seed=7, export__path=str(path), precision="fp32", **PLANS[plan])
    result = run_train(settings, tmp_path)
    assert (result["steps"], result["loss_last"]) == (0, None)
    torch.manual_seed(7)
    start = models.TinyGPT().state_dict()
    exported = load_file(path)
    assert exported.keys() == start.keys()
    assert all(torch.equal(exported[name], start[name]) for name in start)
    assert [file.name for file in path.parent.iterdir()] == ["weights.safetensors"]


def test_trained_weights_load_into_the_plain_model(tmp_path):
    path = tmp_path / "weights.safetensors"
    run_train(config(export__path=str(path), **PLANS["tp2_pp2"]), tmp_path)
    plain = models.TinyGPT().double()
    plain.load_state_dict(load_file(path))
    assert plain.lm_head.weight is plain.wte.weight
    assert sum(p.abs().sum().item() for p in plain.parameters()) == pytest.approx(reference.TINY_GPT_WEIGHTS, rel=1e-11)


def test_padding_of_a_vocabulary_is_not_exported(tmp_path):
    """C10: 101 tokens on two ranks; the first loss is ln 101, five steps are plain, the export has 101 rows."""
    path = tmp_path / "weights.safetensors"
    run_train(
        config(export__path=str(path), plan__tp=2), tmp_path, models.FixedRows(vocab=101), factory=models.ZeroHeadGPT
    )
    for record, right in zip(logged(tmp_path), reference.ZERO_HEAD_GPT_VOCAB_101, strict=True):
        assert (record["loss"], record["grad_norm"]) == pytest.approx(right, rel=1e-9, abs=1e-10)
    assert load_file(path)["lm_head.weight"].shape == load_file(path)["wte.weight"].shape == (101, 16)


def test_export_of_several_dtypes_and_an_empty_tensor(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.randn(2, 2).T,
        "c": torch.tensor(7),
        "d": torch.zeros(0, 4),
        "e": torch.randn(3, dtype=torch.float64),
    }
    specs = {n: SimpleNamespace(shape=t.shape, held=t.dtype, aliases=(), persistent=True) for n, t in tensors.items()}
    save_file(specs, tensors.items(), tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
