"""Losses that are not the mean over a batch's rows are refused where the batch is cut."""

import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import config, on_ranks
from zoo import ZOO

from meg_compile.compiler import compile
from meg_compile.errors import MegError
from meg_compile.plan import Plan
from meg_compile.train.step import Trainer


class Contrastive(models.TinyGPT):
    """Every row against every other."""

    def forward(self, ids):
        pooled = F.normalize(super().forward(ids).mean(1), dim=-1)
        return F.cross_entropy(pooled @ pooled.t(), torch.arange(len(pooled), device=ids.device))


class Centred(models.TinyGPT):
    """Logits less their mean over the batch."""

    def forward(self, ids):
        logits = super().forward(ids)
        return logits - logits.mean(0, keepdim=True)


class TwoTerms(models.TinyGPT):
    """A cross entropy beside another: their means weigh replicas by the labels that each counts."""

    def forward(self, ids, labels):
        logits = super().forward(ids)
        first = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return first + 0.5 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Uneven(models.FixedRows):
    """The first half of each batch counts fewer labels."""

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row if i % 8 >= 4 else row | {"labels": row["labels"].where(torch.arange(12) < 7, -100)}


def first_step(factory, dataset, **settings):
    chosen = config(**settings)
    return on_ranks(chosen, lambda p, e, g: Trainer(chosen, p, e, g, dataset).gradients(0).loss, factory, dataset)


@pytest.mark.parametrize("factory", [Contrastive, Centred])
def test_coupled_rows_need_the_whole_batch(factory):
    data = models.FixedRows()
    for settings in ({"train__micro_batch_size": 4}, {"train__micro_batch_size": 4, "plan__dp": 2}):
        with pytest.raises(MegError, match="couples the rows of a batch"):
            first_step(factory, data, **settings)
    assert first_step(factory, data, train__micro_batch_size=8)[0] > 0


def test_replicas_that_count_differently_are_an_error():
    with pytest.raises(MegError, match="replicas count different numbers of labels"):
        first_step(TwoTerms, Uneven(), plan__dp=2, train__micro_batch_size=4)
    assert first_step(TwoTerms, models.FixedRows(), plan__dp=2, train__micro_batch_size=4)[0] > 0


def test_ordinary_models_do_not_couple_rows():
    coupled = set()
    for name, case in ZOO.items():
        rows = case.batch(0)
        program = compile(case.build, {n: v[:2] for n, v in rows.items()}, Plan(), case.loss, torch.float64)
        if program.coupling is not None:
            coupled.add(name)
    assert coupled == set()


def test_a_linear_over_the_batch_couples():
    class Over(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.eye(2))

        def forward(self, x):
            return torch.einsum("bt,bc->ct", x, self.mix).square().mean()

    assert compile(Over, {"x": torch.zeros(2, 6)}, Plan()).coupling is not None
