"""Sums over replicas that start while backward still runs."""

import pytest
import torch.distributed as dist
from models import FixedRows
from training import config, on_ranks

from meg_compile.runtime import gradients
from meg_compile.train.batches import batches_of


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
