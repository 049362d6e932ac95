"""The loss over validation rows: the plain model's, whatever the plan, and training does not notice it."""

import json
import threading
from functools import partial

import models
import pytest
import reference
import torch
from safetensors.torch import load_file
from training import config, on_ranks

from meg_compile.errors import Refused
from meg_compile.models.loss import cross_entropy
from meg_compile.train.evaluate import Validation, validation_programs, validation_target
from meg_compile.train.loop import train

COMPILING = threading.Lock()  # capture is for one thread at a time
DROPPING = partial(models.TinyGPT, p=0.2)


class Uneven(models.FixedRows):
    """11 rows that training does not read; row i has i + 1 counted labels."""

    def __init__(self, num=11):
        super().__init__()
        self.num = num

    def __getitem__(self, i):
        row = super().__getitem__(i + 80)
        return row | {"labels": row["labels"].where(torch.arange(12) <= i, -100)}

    def __len__(self):
        return self.num


def run(settings, run_dir, factory=DROPPING, valid=None):
    """(records, what is exported, the result) of a run with the validation that `settings` ask for."""
    valid = Uneven() if valid is None else valid
    settings.export.path = str(run_dir / "weights.safetensors")
    programs = {}

    def work(program, executor, groups):
        validation = None
        if settings.eval.every:
            with COMPILING:
                programs.update(programs or validation_programs(settings, program, valid))
            validation = Validation(settings, executor, groups, valid, programs)
        return train(settings, program, executor, groups, models.FixedRows(), run_dir, validation)

    result = on_ranks(settings, work, factory)[0]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return records, load_file(settings.export.path), result


def plain_loss(weights, rows, factory=models.TinyGPT):
    """Of whole weights in evaluation, over all rows at once."""
    model = factory().double()
    model.load_state_dict(weights)
    ids, labels = (torch.stack([row[field] for row in rows]) for field in ("input_ids", "labels"))
    with torch.no_grad():
        return cross_entropy(model.eval()(ids), labels).item()


PLANS = {
    "tp2_pp2": {"plan__tp": 2, "plan__pp": 2},
    "interleaved": {"plan__pp": 2, "plan__vpp": 2, "plan__schedule": "interleaved_1f1b"},
    "dualpipev": {"plan__pp": 2, "plan__vpp": 2, "plan__schedule": "dualpipev"},
    "dp2_zero3": {"plan__dp": 2, "plan__zero": 3},
    "dp4": {"plan__dp": 4},
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_loss_is_the_plain_models(tmp_path, plan):
    """Of 11 rows five micro-batches of two, which replicas share unevenly, and one of one; no mask drops anything.

    Of 3 rows there is none for two of four replicas.
    """
    settings = config(train__steps=3, eval__every=2, **PLANS[plan])
    valid = Uneven(3 if plan == "dp4" else 11)
    records, weights, result = run(settings, tmp_path, valid=valid)
    assert ["valid_loss" in record for record in records] == [False, True, True]
    right = plain_loss(weights, [valid[i] for i in range(len(valid))])
    assert result["valid_loss_last"] == records[-1]["valid_loss"] == pytest.approx(right, rel=1e-12)
    assert records[1]["valid_loss"] != records[2]["valid_loss"]


@pytest.mark.parametrize("options", [PLANS["tp2_pp2"], {"dropout": "fast"}], ids=["tp2_pp2", "fast"])
def test_training_does_not_notice(tmp_path, options, capsys):
    """Not by a bit, its own dropout on. With some of the rows only."""
    runs = []
    for every in (None, 1):
        (tmp_path / str(every)).mkdir()
        settings = config(train__steps=3, eval__every=every, eval__batches=1, **options)
        runs.append(run(settings, tmp_path / str(every)))
    (before, start, _), (after, end, _) = runs
    assert [(r["loss"], r["grad_norm"]) for r in before] == [(r["loss"], r["grad_norm"]) for r in after]
    assert all(torch.equal(start[name], end[name]) for name in start)
    right = plain_loss(end, [Uneven()[i] for i in range(8)])
    assert after[-1]["valid_loss"] == pytest.approx(right, rel=1e-12)
    assert f"  valid_loss {right:.4f}\n" in capsys.readouterr().out


class Squares(models.TinyGPT):
    """A loss of its own, that is a mean over rows."""

    def forward(self, input_ids):
        return {"loss": super().forward(input_ids).square().mean()}


def test_a_short_micro_batch_weighs_as_its_rows(tmp_path):
    records, weights, _ = run(config(train__steps=1, eval__every=1, precision="fp32"), tmp_path, Squares)
    model = models.TinyGPT()
    model.load_state_dict(weights)
    with torch.no_grad():
        right = model(torch.stack([Uneven()[i]["input_ids"] for i in range(11)])).square().mean().item()
    assert records[0]["valid_loss"] == pytest.approx(right, rel=1e-5)  # float32


def test_bf16_weights_are_read_as_they_are_now(tmp_path):
    settings = config(train__steps=2, eval__every=1, precision="bf16", plan__dp=2, plan__zero=1)
    records, weights, _ = run(settings, tmp_path, models.TinyGPT)
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    right = plain_loss(rounded, [Uneven()[i] for i in range(11)])
    assert records[1]["valid_loss"] == pytest.approx(right, rel=0.02)  # activations are rounded to 8 bits
    assert abs(records[0]["valid_loss"] - right) > 0.05 * right


# ------------------------------------------------------------------------------------------------ which rows


def text(**changes):
    settings = config(**changes)
    settings.data.target = "meg_compile.train.data.TextRows"
    settings.data.args = {"seq_len": 8, "path": "a.txt", "tokenizer": None, "split": [9, 1]}
    return settings


@pytest.mark.parametrize(
    ("given", "args"),
    [
        (None, {"path": "a.txt", "split": [9, 1], "part": "valid"}),
        ({"path": "b.txt"}, {"path": "b.txt", "split": [1], "part": "train"}),
        ({"part": "test"}, {"path": "a.txt", "split": [9, 1], "part": "test"}),
    ],
)
def test_what_differs_from_the_training_data(given, args):
    target = validation_target(text(eval__data=given))
    assert target.args == {"seq_len": 8, "tokenizer": None} | args


def test_another_class_gets_its_own_arguments():
    settings = text(eval__data={"_target_": "models.FixedRows", "steps": 2})
    assert validation_target(settings).args == {"steps": 2}
    assert len(validation_target(settings).build()) == 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (config(), r"eval\.data=null: models\.FixedRows has no argument `part`.*name other data by eval\.data="),
        (
            text(eval__data={"pat": "b"}),
            r"eval\.data\.pat=b: TextRows has no such argument; did you mean eval\.data\.path",
        ),
        (text(eval__data={"_target_": "models.Gone"}), r"eval\.data\._target_=models\.Gone"),
        (text(eval__data={"seq_len": "long"}), r"eval\.data\.seq_len=long: must be a whole number"),
    ],
)
def test_data_that_cannot_validate_is_refused(settings, said):
    with pytest.raises(Refused, match=said):
        validation_target(settings)


def test_a_loss_that_has_no_mean_over_rows_is_refused(tmp_path):
    class Coupled(models.TinyGPT):
        def forward(self, input_ids):
            return {"loss": super().forward(input_ids).square().sum((1, 2)).std()}

    settings = config(train__steps=1, eval__every=1, train__micro_batch_size=8)
    with pytest.raises(Refused, match=r"eval\.every=1: the loss couples the rows of a batch"):
        run(settings, tmp_path, Coupled)


def test_reference_is_plain():
    """What `plain_loss` computes does not depend on what is tested here."""
    rows = [models.FixedRows()[i] for i in range(8)]
    weights = reference.build(models.TinyGPT).state_dict()
    assert plain_loss(weights, rows) == pytest.approx(reference.TINY_GPT[0][0], rel=1e-9)
