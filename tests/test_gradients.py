"""Sums over replicas that start while backward still runs."""

import pytest
import torch.distributed as dist
from models import FixedRows, TinyGPT
from training import config, on_ranks

from meg_compile.models.loss import cross_entropy
from meg_compile.runtime import gradients
from meg_compile.train.batches import batches_of
from meg_compile.verify import verify


@pytest.mark.parametrize("plan", [{"dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"cp": 2}], ids=str)
def test_buckets_go_out_early_and_hold_the_sums(plan, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 4096)  # so that there are several
    settings = config(**{f"plan__{key}": value for key, value in plan.items()})

    def work(program, executor, groups):
        batch = batches_of(settings, FixedRows(), groups.mesh.dp, groups.coords.dp)[0]
        sent, grads = [], []
        for early in (False, True, True, True):
            for parameter in executor.parameters.values():
                parameter.grad = None
            executor.run(batch, 0.1, reduce=early)
            if early:
                sent.append((len(executor.overlapped.sent), len(executor.overlapped.buckets)))
            executor.reduce_gradients()
            dist.barrier()
            grads.append({name: p.grad.clone() for name, p in executor.parameters.items()})
        return sent, grads

    for (counting, *later), (right, *others) in on_ranks(settings, work):
        assert counting == (0, 0), "the first step only counts"
        assert all(early == total > 1 for early, total in later), "all of them were on their way before backward ended"
        for grads in others:
            assert all((grads[name] - grad).abs().max() < 1e-12 for name, grad in right.items())


def test_a_schedule_that_splits_backward_sums_afterwards():
    """Gradients that wait for the bubble are no part of what autograd sees."""
    settings = config(plan__pp=2, plan__dp=2, plan__vpp=2, plan__schedule="zbv_zero_bubble", train__steps=3)

    def work(program, executor, groups):
        return verify(settings, program, executor, groups, TinyGPT, cross_entropy, FixedRows(), steps=3)

    report = on_ranks(settings, work)[0]
    assert report.ok, report.worst()
