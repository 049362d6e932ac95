"""What has gone wrong for users of tools like this one, on their own small models, with the right numbers."""

import math
import os
from functools import partial

import models
import pytest
import reference
import torch
from safetensors.torch import load_file
from torch import nn
from training import config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import CaptureError, Refused
from meg_compile.ops.collectives import reduce_from_tp
from meg_compile.plan import Plan
from meg_compile.train.batches import Batches, checksum
from meg_compile.train.step import Trainer
from meg_compile.weights import save_file

EXACT = {"rel": 1e-9, "abs": 1e-10}


def rows_of(steps, factory=models.TinyGPT, dataset=None, **settings):
    """(loss, norm) of each step, asserted to be the same on every rank, and each rank's program and tensors."""
    chosen = config(**settings)

    def work(program, executor, groups):
        trainer = Trainer(chosen, program, executor, groups, dataset or models.FixedRows())
        rows = []
        for step in range(steps):
            gradients = trainer.gradients(step)
            trainer.update(step, gradients.norm)
            rows.append((gradients.loss, gradients.norm))
        return rows, program, {name: t.detach().clone() for name, t in executor.tensors.items()}

    ranks = on_ranks(chosen, work, factory, dataset)
    assert all(rows == ranks[0][0] for rows, *_ in ranks)
    return ranks[0][0], ranks


def close(rows, expected):
    return rows == [pytest.approx(row, **EXACT) for row in expected]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_row_parallel_bias_is_added_once(tp):
    rows, ranks = rows_of(3, models.WrappedBigBias, plan__tp=tp)
    assert close(rows, reference.WRAPPED_BIG_BIAS)
    _, program, _ = ranks[0]
    assert program.params["core.fc2.weight"].local_numel == 8 * 16 // tp
    biases = [tensors["core.fc2.bias"] for *_, tensors in ranks]
    assert all(torch.equal(bias, biases[0]) for bias in biases)
    if tp > 1:
        (add,) = [
            n for n in program.stages[0].graph.nodes if any(a.target == "core.fc2.bias" for a in n.all_input_nodes)
        ]
        assert add.args[0].target is reduce_from_tp


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_big_bias_does_not_grow_with_tp(tp):
    """One product without a batch dim of tokens: the mean of its output is its loss here."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = models.BigBiasMLP()

        def forward(self, x):
            return self.mlp(x).mean()

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"x": reference.big_bias_input()[i]}

    sizes = {"train__global_batch_size": 2, "train__micro_batch_size": 1}
    rows, _ = rows_of(1, Mean, Rows(), plan__tp=tp, **sizes)
    assert rows[0][0] == pytest.approx(reference.BIG_BIAS_MEAN, rel=1e-12)


@pytest.mark.parametrize("plan", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_copies_of_a_tied_weight_stay_one(plan, optimizer):
    tp, pp = plan
    _, ranks = rows_of(3, plan__tp=tp, plan__pp=pp, optim__name=optimizer, optim__lr=0.01)
    for r, (*_, tensors) in enumerate(ranks):
        for other, (*_, others) in enumerate(ranks):
            if r % tp == other % tp and "wte.weight" in tensors and "wte.weight" in others:
                assert torch.equal(tensors["wte.weight"], others["wte.weight"])


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_padding_of_a_vocabulary_enters_nothing(tp, pp, tmp_path):
    data = models.FixedRows(vocab=101)
    rows, _ = rows_of(5, models.ZeroHeadGPT, data, plan__tp=tp, plan__pp=pp)
    assert close(rows, reference.ZERO_HEAD_GPT_VOCAB_101)
    assert rows[0][0] == pytest.approx(math.log(101), rel=1e-12)
    tied = partial(models.TinyGPT, vocab=101)
    expected, _ = reference.plain_run(tied, 3, vocab=101)
    assert close(rows_of(3, tied, data, plan__tp=tp, plan__pp=pp)[0], expected)

    def shape(program, executor, groups):
        first = groups.rank == 0
        save_file(program.params, executor.gather("value"), tmp_path / "model.safetensors" if first else None)

    on_ranks(config(plan__tp=tp, plan__pp=pp), shape, models.ZeroHeadGPT, data)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["lm_head.weight"].shape == saved["wte.weight"].shape == (101, 16)


CUTS = [
    (micro, pp, dp, schedule)
    for micro in (1, 2, 4, 8)
    for pp in (1, 2)
    for dp in (1, 2)
    for schedule in (["1f1b"] if pp == 1 else ["1f1b", "gpipe", "interleaved_1f1b"])
    if 8 % (micro * dp) == 0 and (pp == 1 or 8 // (micro * dp) >= pp or (schedule == "gpipe"))
]


@pytest.mark.parametrize(("micro", "pp", "dp", "schedule"), CUTS)
def test_the_update_does_not_depend_on_how_the_batch_is_cut(micro, pp, dp, schedule):
    settings = {"plan__vpp": 2} if schedule == "interleaved_1f1b" else {}
    settings |= {"plan__pp": pp, "plan__dp": dp, "plan__schedule": schedule, "train__micro_batch_size": micro}
    assert close(rows_of(3, **settings)[0], reference.TINY_GPT[:3])


@pytest.mark.parametrize(
    ("layers", "plan", "expected"),
    [
        (5, {"pp": 2}, reference.TINY_GPT_5_LAYERS),
        (7, {"pp": 3}, reference.TINY_GPT_7_LAYERS),
        (7, {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, reference.TINY_GPT_7_LAYERS),
    ],
)
def test_layer_counts_that_do_not_divide_lose_no_layer(layers, plan, expected):
    settings = {f"plan__{name}": value for name, value in plan.items()}
    rows, ranks = rows_of(3, partial(models.TinyGPT, layers=layers), train__micro_batch_size=1, **settings)
    assert close(rows, expected)
    _, program, _ = ranks[0]
    assert [name for stage in program.stages for name in stage.layers] == [f"h.{i}" for i in range(layers)]
    assert all(name in program.explain() for name in ("h.0 .. h.", f"h.{layers - 1}"))


def tiny_inputs(length=12):
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_more_stages_than_layers_are_refused():
    with pytest.raises(Refused, match=r"plan.pp=4: is more stages than the model's 3 layers; use at most 3"):
        compile(partial(models.TinyGPT, layers=3), tiny_inputs(), Plan(pp=4))


def test_sizes_that_do_not_divide_are_refused_all_at_once():
    build = partial(models.TinyGPT, d=24, heads=6, vocab=102)
    with pytest.raises(Refused) as refusal:
        compile(build, tiny_inputs(), Plan(tp=4))
    assert "plan.tp=4: does not divide the 6 heads" in str(refusal.value) and "1, 2, 3 or 6" in str(refusal.value)
    with pytest.raises(Refused) as refusal:
        compile(build, tiny_inputs(), Plan(tp=5))
    text = str(refusal.value)
    assert "2 faults" in text and "6 heads" in text and "96 ffn" in text and "for all of these: 1, 2, 3 or 6" in text
    kept = compile(build, tiny_inputs(), Plan(tp=4, strict=False))
    assert not kept.params["h.0.attn.q.weight"].sharded and kept.params["h.0.fc1.weight"].sharded
    assert "tp=4 does not divide 6" in kept.explain()


@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 1}])
def test_sanity_checks_in_a_model_do_not_stop_capture(plan):
    settings = {f"plan__{name}": value for name, value in plan.items()}
    expected, _ = reference.plain_run(models.AssertNet, 3)
    assert close(rows_of(3, models.AssertNet, **settings)[0], expected)
    with pytest.raises(CaptureError, match="sequence of 40 does not fit in 32"):
        compile(models.AssertNet, tiny_inputs(40), Plan(**plan))


@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}])
@pytest.mark.parametrize(
    ("masked", "fields", "loss"),
    [
        (3, ["input_ids", "attention_mask", "labels"], reference.DICT_NET_LOSS_WITH_MASK),
        (0, ["input_ids", "labels"], reference.DICT_NET_LOSS_NO_MASK),
    ],
)
def test_keyword_inputs_dict_outputs_and_labels_at_the_end(plan, masked, fields, loss):
    settings = {f"plan__{name}": value for name, value in plan.items()} | {"data__fields": fields}
    rows, _ = rows_of(1, models.DictNet, models.MaskedRows(masked=masked), **settings)
    assert rows[0][0] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("plan", [(2, 2, 1), (2, 1, 2)])
def test_random_rows_are_the_same_on_all_ranks_of_a_replica(plan):
    """The trainer compares checksums in every step, and reports those of each replica."""
    tp, pp, dp = plan
    seen = {}
    for rank in range(tp * pp * dp):
        at = Plan(tp=tp, pp=pp, dp=dp).mesh.coords(rank)
        torch.manual_seed(os.getpid() + rank)  # whatever state a rank's generator is in
        options = {"seed": 1, "shuffle": True, "global_batch_size": 8, "dp": dp, "dp_rank": at.dp}
        batches = Batches(models.RandomRows(), **options)
        seen.setdefault(at.dp, set()).add(tuple(checksum(batches[step]) for step in range(5)))
    assert all(len(found) == 1 for found in seen.values()) and len({*map(tuple, seen.values())}) == dp
