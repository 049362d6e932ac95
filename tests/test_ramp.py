"""A global batch that grows, and where in the rows each step stands."""

import json
import re
from itertools import pairwise

import models
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import config, on_ranks

from meg_compile.config import Here
from meg_compile.config.rules import _ramp
from meg_compile.models.loss import cross_entropy
from meg_compile.train.batches import Batches, batch_size
from meg_compile.train.loop import train

RAMP = {"start": 4, "increment": 2, "rows": 12}
SPANS = [(0, 4), (4, 4), (8, 6), (14, 8), (22, 8)]
"""By hand: 4 rows until 6 are consumed, 6 until 12."""


def test_the_size_grows_in_equal_parts():
    assert [batch_size(consumed, 8, RAMP) for consumed in (0, 5, 6, 11, 12, 100)] == [4, 4, 6, 6, 8, 8]
    assert batch_size(0, 8, None) == batch_size(0, 8, {"start": 8, "increment": 1, "rows": 50}) == 8


@pytest.mark.parametrize(
    "plan", [{"plan__tp": 2, "plan__pp": 2, "train__micro_batch_size": 1}, {"plan__pp": 2, "plan__dp": 2}]
)
def test_training_is_the_plain_one(tmp_path, plan):
    """With 2 to 8 micro-batches on each rank."""
    settings = config(**{"train__micro_batch_size": 1} | plan, train__batch_ramp=RAMP)

    def work(program, executor, groups):
        return train(settings, program, executor, groups, models.FixedRows(), tmp_path)

    result = on_ranks(settings, work)[0]
    model, rows = reference.build(models.TinyGPT), models.FixedRows()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["batch_size"] for record in records] == [size for _, size in SPANS]
    assert result["tokens"] == 12 * 30
    for record, (first, size) in zip(records, SPANS, strict=True):
        batch = [rows[i] for i in range(first, first + size)]
        ids, labels = (torch.stack([row[field] for row in batch]) for field in ("input_ids", "labels"))
        loss = cross_entropy(model(ids), labels)
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        assert (record["loss"], record["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def ids(batches, steps):
    return [batches[step]["sample_id"].tolist() for step in steps]


def test_a_run_goes_on_with_another_batch_size():
    """It reads what is left of the epoch in the order that it began with, and nothing twice."""
    rows = models.FixedRows(steps=1, batch=20)
    before = Batches(rows, global_batch_size=4, shuffle=True, seed=5)
    read = [i for step in ids(before, range(3)) for i in step]
    after = Batches(rows, global_batch_size=8, dp=2, dp_rank=0, shuffle=True, seed=5)
    after.resume(3, before.consumed(3))
    other = Batches(rows, global_batch_size=8, dp=2, dp_rank=1, shuffle=True, seed=5)
    other.resume(3, before.consumed(3))
    left = [i for batches in (after, other) for i in ids(batches, [3])[0]]
    assert sorted(read + left) == list(range(20))
    assert left == [i for step in ids(before, (3, 4)) for i in step]
    assert after.span(4) == (20, 8)
    with pytest.raises(AssertionError, match="begins at step 3"):
        after[2]


def test_a_batch_lies_in_one_epoch():
    batches = Batches(models.FixedRows(steps=1, batch=11), global_batch_size=8, ramp=RAMP)
    assert [batches.span(step) for step in range(4)] == [(0, 4), (4, 4), (11, 6), (22, 8)]
    assert ids(batches, [2, 0]) == [list(range(6)), list(range(4))]  # 8 to 10 are passed over, and back again


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3))
def test_steps_in_any_order_are_those_in_order(num, size, back):
    size = min(size, num)
    in_order, jumping = (Batches(range(num), global_batch_size=size) for _ in range(2))
    spans = [in_order.span(step) for step in range(12)]
    assert all(first % num + size <= num for first, _ in spans)
    assert all(first + size <= following for (first, _), (following, _) in pairwise(spans))
    for step in (7, 7 - back, 11):
        assert jumping.span(step) == spans[step]


@pytest.mark.parametrize(
    ("ramp", "plan", "said"),
    [
        ({"start": 4}, {}, "is not start, increment and rows"),
        ({"start": 0, "increment": 2, "rows": 9}, {}, "each a count"),
        (
            {"start": 3, "increment": 5, "rows": 9},
            {},
            "3 rows are no multiple of .* = 2; use .*start=2 .*increment=6, or",
        ),
        (
            {"start": 4, "increment": 3, "rows": 9},
            {},
            "does not reach .*=8 from 4 in steps of 3; use .*start=4 .*increment=2",
        ),
        ({"start": 16, "increment": 2, "rows": 9}, {}, "does not reach .*=8 from 16"),
        (
            {"start": 2, "increment": 2, "rows": 9},
            {"pp": 2},
            "at 2 rows plan.schedule=1f1b needs at least 2 micro-batches .*start=4",
        ),
        ({"start": 2, "increment": 2, "rows": 9}, {"pp": 4}, "use train.batch_ramp=null"),
    ],
)
def test_sizes_that_do_not_suit_are_refused(ramp, plan, said):
    settings = config(**{f"plan__{name}": size for name, size in plan.items()})
    values = {f"plan.{name}": value for name, value in vars(settings.plan).items()} | {"task": "train"}
    values |= {f"train.{name}": value for name, value in vars(settings.train).items()} | {"train.batch_ramp": ramp}
    (fault,) = _ramp(values, Here())
    assert fault.key == "train.batch_ramp"
    assert re.search(said, f"{fault}")
