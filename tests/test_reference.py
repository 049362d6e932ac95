"""The shared models, trained plainly in one process, give the reference numbers: this pins both."""

import math

import models
import pytest
import reference
import torch

CASES = {
    "tiny_gpt": (models.TinyGPT, 64, reference.TINY_GPT),
    "5_layers": (lambda: models.TinyGPT(layers=5), 64, reference.TINY_GPT_5_LAYERS),
    "7_layers": (lambda: models.TinyGPT(layers=7), 64, reference.TINY_GPT_7_LAYERS),
    "zero_head": (models.ZeroHeadGPT, 101, reference.ZERO_HEAD_GPT_VOCAB_101),
    "big_bias": (models.WrappedBigBias, 64, reference.WRAPPED_BIG_BIAS),
}


@pytest.mark.parametrize("case", CASES)
def test_plain_training_gives_the_reference_numbers(case):
    factory, vocab, expected = CASES[case]
    rows, model = reference.plain_run(factory, len(expected), vocab)
    for row, right in zip(rows, expected, strict=True):
        assert row == pytest.approx(right, rel=1e-9, abs=1e-10)
    if case == "tiny_gpt":
        assert sum(p.abs().sum().item() for p in model.parameters()) == pytest.approx(reference.TINY_GPT_WEIGHTS)
        assert sum(p.numel() for p in model.parameters()) == reference.TINY_GPT_NUM_PARAMETERS
    if case == "zero_head":
        assert rows[0][0] == pytest.approx(math.log(101), rel=1e-12)


def test_big_bias_is_added_once():
    output = reference.build(models.BigBiasMLP)(reference.big_bias_input())
    assert output.mean().item() == pytest.approx(reference.BIG_BIAS_MEAN, rel=1e-12)


@pytest.mark.parametrize(
    ("masked", "fields", "loss"),
    [
        (3, ("input_ids", "attention_mask", "labels"), reference.DICT_NET_LOSS_WITH_MASK),
        (0, ("input_ids", "labels"), reference.DICT_NET_LOSS_NO_MASK),
    ],
)
def test_dict_net(masked, fields, loss):
    rows = models.MaskedRows(steps=1, masked=masked)
    batch = {field: torch.stack([row[field] for row in rows]) for field in fields}
    assert reference.build(models.DictNet)(**batch)["loss"].item() == pytest.approx(loss, rel=1e-12)
