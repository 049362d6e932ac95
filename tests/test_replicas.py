"""Copies of a parameter are compared bit by bit, wherever ranks hold the same."""

from functools import partial

import models
import pytest
import torch
from training import config, on_ranks

from meg_compile.errors import MegError
from meg_compile.runtime.replicas import Replicas, fingerprint

SMALL = partial(models.TinyGPT, layers=2)

# plan, parameter, rank whose copy changes -> what the message says of ranks. Ranks count tp first, then cp, dp, pp.
FLIPS = [
    ({"tp": 2}, "h.0.n1.weight", 1, "rank 0 holds other bits than rank 1"),
    ({"tp": 2, "dp": 2}, "h.1.fc1.weight", 1, "rank 1 holds other bits than rank 3"),
    ({"dp": 3}, "h.1.fc2.bias", 1, "rank 1 holds other bits than ranks 0, 2"),
    ({"cp": 2}, "h.0.attn.q.weight", 0, "rank 0 holds other bits than rank 1"),
    ({"tp": 2, "pp": 2}, "wte.weight", 3, "rank 1 holds other bits than rank 3"),
    ({"tp": 2, "dp": 2, "zero": 3}, "wpe.weight", 0, "rank 0 holds other bits than rank 1"),
]


@pytest.mark.parametrize(("plan", "name", "rank", "ranks"), FLIPS, ids=[f"{plan}" for plan, *_ in FLIPS])
def test_one_flipped_bit_is_found(plan, name, rank, ranks):
    settings = config(train__global_batch_size=24, **{f"plan__{key}": value for key, value in plan.items()})

    def work(program, executor, groups):
        replicas = Replicas(executor)
        replicas.check(1)
        if groups.rank == rank:
            executor.tensors[name].detach().view(torch.int64).flatten()[-1] ^= 1 << 63
        with pytest.raises(MegError) as error:
            replicas.check(7)
        return str(error.value)

    for said in on_ranks(settings, work, SMALL):
        assert said.startswith(f"step 7: copies of {name} have parted: {ranks};"), said


def test_where_nothing_is_alike_nothing_is_sent(monkeypatch):
    def work(program, executor, groups):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: pytest.fail("an all-reduce"))
        Replicas(executor).check(1)

    on_ranks(config(), work, SMALL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_every_bit_counts(dtype):
    start = torch.randn(3, 5, dtype=dtype)
    flat = start.view(torch.uint8).flatten()
    for byte in range(flat.numel()):
        for bit in range(8):
            changed = start.clone()
            changed.view(torch.uint8).view(-1)[byte] ^= 1 << bit
            assert fingerprint(changed) != fingerprint(start)
    assert fingerprint(start.clone()) == fingerprint(start) and 0 <= fingerprint(start) < 2**62


def test_changes_that_add_up_to_nothing_count():
    start = torch.zeros(4).view(torch.int32)
    changed = (start + torch.tensor([1, -1, 2, -2], dtype=torch.int32)).view(torch.float32)
    assert fingerprint(changed) != fingerprint(start.view(torch.float32))
