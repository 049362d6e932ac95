"""What is kept for backward follows the published formulas (Korthikanti et al. 2022, arXiv:2205.05198, table 2).

s tokens, b rows, h hidden, a heads, t tp ranks, bf16 activations of 2 bytes, dropout masks of 1. Bytes are counted as
autograd saves them, each storage once, as long as they are held.
"""

import threading

import pytest
import torch
from held import holding, looking_into_regather
from models import FixedRows
from threads import run_threads

from meg_compile.compiler import compile
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.batches import Batches

S, B, H, A = 64, 2, 64, 4
SBH = S * B * H
SCORES = 5 * A * S / H


def peaks(plan, layers, micro_batches=1):
    """The most bytes that each rank holds for backward during a step."""
    build = lambda: GPT2(vocab_size=64, context=S, layers=layers, hidden=H, heads=A, dropout=0.1)  # noqa: E731
    ids = torch.zeros(B, S, dtype=torch.long)
    program = compile(build, {"input_ids": ids, "labels": ids}, plan, dtype=torch.bfloat16)
    rows = B * micro_batches
    batch = program.keyed(Batches(FixedRows(seq=S), global_batch_size=rows)[0], 0, 0, list(range(rows)))
    gate = threading.Barrier(plan.mesh.size, timeout=60)

    def work(rank):
        executor = Executor(program, init_groups(plan.mesh, "cpu"), torch.device("cpu"))
        gate.wait()
        executor.load()
        gate.wait()
        with holding([*executor.tensors.values(), *executor.copies.values()]) as held:
            executor.run(batch, 1.0)
        return held.peak

    with looking_into_regather():
        return run_threads(plan.mesh.size, work)


def layer_bytes(plan):
    """Of one layer: what two more of them add."""
    return (peaks(plan, 4)[0] - peaks(plan, 2)[0]) / 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("vpp", [1, 2])
def test_the_first_stage_of_a_pipeline(tp, vpp):
    """As much as all layers of one micro-batch; interleaved, 1 + (p - 1) / (p v) times that (section 4.2.3)."""
    schedule = "interleaved_1f1b" if vpp > 1 else "1f1b"
    few, many = (
        peaks(Plan(tp=tp, pp=2, vpp=vpp, schedule=schedule, stages=(n,) * 2 * vpp), 2 * vpp * n, micro_batches=4)[0]
        for n in (1, 2)
    )
    formula = (10 + (24 + SCORES) / tp) * (1 + 1 / 4 if vpp == 2 else 1)
    assert (many - few) / SBH / (2 * vpp) == pytest.approx(formula, rel=0.1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer(tp, sp, recompute):
    if sp and tp == 1:
        pytest.skip("nothing to share the sequence with")
    outside = 34 / tp if sp else 10 + 24 / tp
    formula = {"none": outside + SCORES / tp, "selective": outside, "full": 2 / tp if sp else 2}[recompute]
    plan = Plan(tp=tp, sp=sp, recompute=recompute)
    assert layer_bytes(plan) / SBH == pytest.approx(formula, rel=0.1)
