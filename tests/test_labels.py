"""A loss whose replicas would not weigh as the global batch weighs them is an error."""

import models
import pytest
import torch
import torch.nn.functional as F
from training import config, on_ranks

from meg_compile.errors import MegError
from meg_compile.train.step import Trainer


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


def test_replicas_that_count_differently_are_an_error():
    with pytest.raises(MegError, match="replicas count different numbers of labels"):
        first_step(TwoTerms, Uneven(), plan__dp=2, train__micro_batch_size=4)
    assert first_step(TwoTerms, models.FixedRows(), plan__dp=2, train__micro_batch_size=4)[0] > 0
