"""What the compiler says that a step sends is what a step sends, to the byte, group by group and rank by rank.

A whole training step runs on threads; the process groups themselves count what passes through them.
"""

import threading
from collections import Counter
from functools import partial
from math import prod
from unittest.mock import patch

import models
import pytest
import torch
import torch.distributed as dist
import training
from compare import compile_case
from threads import run_threads, threaded
from torch import nn
from zoo import ZOO, lm
from zoo_layers import NormedHeads

from meg_compile.compiler import compile
from meg_compile.explain.traffic import collectives
from meg_compile.models.gpt2 import GPT2
from meg_compile.ops.group import Group
from meg_compile.plan import Plan
from meg_compile.program import Program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.step import Trainer

MICRO, ROWS, SEQ = 2, 8, models.SEQ


def gpt2(**options):
    return partial(GPT2, **{"vocab_size": 64, "context": 16, "layers": 4, "hidden": 16, "heads": 4} | options)


def program_of(build, plan, dtype=torch.float64) -> Program:
    ids = torch.zeros(MICRO, SEQ, dtype=torch.long)
    return compile(build, {"input_ids": ids, "labels": ids}, plan, dtype=dtype)


class Counting:
    """Counts, per rank and process group, the bytes that all-reduces and sends are given."""

    def __init__(self):
        self.bytes: Counter[tuple[int, str, str]] = Counter()
        self.calls: Counter[tuple[int, str, str]] = Counter()
        self.lock = threading.Lock()
        self.moves = threading.local()
        local = threaded.ProcessLocalGroup
        real_reduce, real_send, real_exchange = local.allreduce, local.send, local.all_to_all_single
        real_gather, real_scatter = local.all_gather_single, local.reduce_scatter_single

        def allreduce(group, tensor_list, *args, **kwargs):
            self.note("all_reduce", group, tensor_list)
            return real_reduce(group, tensor_list, *args, **kwargs)

        def send(group, tensors, *args, **kwargs):
            self.note("send", group, tensors)
            return real_send(group, tensors, *args, **kwargs)

        def gather(group, whole, part, *args, **kwargs):
            self.note("all_gather", group, [whole])
            return real_gather(group, whole, part, *args, **kwargs)

        def scatter(group, part, whole, *args, **kwargs):
            self.note("reduce_scatter", group, [whole])
            return real_scatter(group, part, whole, *args, **kwargs)

        def exchange(group, received, sent, *args, **kwargs):
            """How both are done on the CPU: a rank sends all but its own of as many parts as there are ranks."""
            parts = group.size() - 1
            assert sent.numel() % parts == 0 and received.numel() == sent.numel()
            self.note(self.moves.kind, group, [sent.view(parts, -1)[:1]] * group.size(), calls=1)
            return real_exchange(group, received, sent, *args, **kwargs)

        def named(kind):
            real = getattr(Group, kind)

            def move(*args):
                self.moves.kind = kind
                return real(*args)

            return patch.object(Group, kind, move)

        self.patches = (  # a barrier of torch's would count too: it is an all-reduce here
            patch.object(local, "allreduce", allreduce),
            patch.object(local, "send", send),
            patch.object(local, "all_gather_single", gather),
            patch.object(local, "reduce_scatter_single", scatter),
            patch.object(local, "all_to_all_single", exchange),
            named("all_gather"),
            named("reduce_scatter"),
        )

    def note(self, kind, group, tensors, calls=None):
        key = (dist.get_rank(), kind, group.pg_name)
        with self.lock:
            self.bytes[key] += sum(t.numel() * t.element_size() for t in tensors)
            self.calls[key] += calls or len(tensors)


def measure(program: Program, vocab: int) -> tuple[Counter, Counter]:
    """(bytes, calls) of the second step by (rank, kind, group): what the groups of an executor saw."""
    counting, gate = Counting(), threading.Barrier(program.plan.mesh.size, timeout=60)
    names: dict[tuple[int, str], str] = {}
    config = training.config(train__micro_batch_size=MICRO, train__global_batch_size=ROWS)

    def work(rank):
        groups = init_groups(program.plan.mesh, "cpu")
        executor = Executor(program, groups, torch.device("cpu"))
        gate.wait()  # no rank may draw random numbers while another seeds its own
        executor.load()
        trainer = Trainer(config, program, executor, groups, models.FixedRows(vocab=vocab))
        known = {
            "tp": groups.tp,
            "pp": groups.pp,
            "dp": groups.dp,
            "cp": groups.cp,
            "world": dist.group.WORLD,
        }
        if groups.cp is not None and groups.dp is not None:
            known["dp_cp"] = groups.dp_cp
        names.update({(rank, group.pg_name): name for name, group in known.items() if group is not None})
        trainer.gradients(0)  # in its first step a pipeline greets its neighbours
        gate.wait()
        if rank == 0:
            for p in counting.patches:
                p.start()
        gate.wait()
        trainer.gradients(1)

    try:
        run_threads(program.plan.mesh.size, work)
    finally:
        patch.stopall()
    return tuple(by_name(counter, names) for counter in (counting.bytes, counting.calls))


def by_name(counter, names) -> Counter:
    """A group that an executor made for itself is one of copies of tied parameters."""
    out = Counter()
    for (rank, kind, pg), value in counter.items():
        out[rank, kind, names.get((rank, pg), "tied")] += value
    return out


def expected(program: Program) -> Counter:
    plan, out = program.plan, Counter()
    num_micro_batches = ROWS // plan.dp // MICRO
    for rank in range(plan.mesh.size):
        stages = program.stage_of_rank(plan.mesh.coords(rank).pp)
        for c in collectives(program):
            if c.stage is None or c.stage in stages:
                # where one group spans the world, the world's messages are told apart by nothing
                out[rank, c.kind, c.group] += c.per_step(num_micro_batches)
    return out


def folded(counter: Counter, program: Program) -> dict:
    """Bytes by rank and kind, with groups of the same ranks as one: a group that spans the world is the world."""
    out = Counter()
    for (rank, kind, group), value in counter.items():
        sizes = [getattr(program.plan, dim, 0) for dim in group.split("_")]
        out[rank, kind, "world" if prod(sizes) == program.plan.mesh.size else group] += value
    return {key: value for key, value in out.items() if value}


PLANS = [
    Plan(tp=2),
    Plan(tp=4),
    Plan(pp=2),
    Plan(pp=4),
    Plan(tp=2, pp=2),
    Plan(dp=2),
    Plan(tp=2, dp=2),
    Plan(pp=2, dp=2),
    Plan(tp=2, pp=2, dp=2),
    Plan(pp=2, schedule="gpipe"),
    Plan(pp=2, vpp=2, schedule="interleaved_1f1b"),
    Plan(tp=2, pp=2, vpp=2, schedule="interleaved_1f1b"),
    Plan(tp=2, pp=2, vpp=2, schedule="zbv_zero_bubble", sp=True),
    Plan(pp=2, vpp=2, schedule="dualpipev"),
    Plan(tp=2, sp=True),
    Plan(tp=4, sp=True),
    Plan(tp=2, pp=2, dp=2, sp=True),
    Plan(cp=2, tp=2, sp=True),
    Plan(cp=2, dp=2),
    Plan(tp=2, recompute="full"),
    Plan(tp=2, sp=True, recompute="full"),
    Plan(cp=2, tp=2, recompute="selective"),
]


def name(plan):
    sizes = [f"{dim}{getattr(plan, dim)}" for dim in ("tp", "cp", "pp", "vpp", "dp") if getattr(plan, dim) > 1]
    recompute = "" if plan.recompute == "none" else f"-{plan.recompute}"
    return "-".join(sizes) + recompute + "-sp" * plan.sp + "-gpipe" * (plan.schedule == "gpipe")


@pytest.mark.parametrize(
    ("plan", "tied"),
    [*((plan, True) for plan in PLANS), *((plan, False) for plan in PLANS[4:7])],
    ids=lambda value: name(value) if isinstance(value, Plan) else "tied" if value else "untied",
)
def test_a_step_of_gpt2_sends_what_the_plan_says(plan, tied):
    program = program_of(gpt2(tied=tied, layers=max(2, plan.num_stages)), plan)
    assert folded(measure(program, 64)[0], program) == folded(expected(program), program)


@pytest.mark.parametrize("plan", [Plan(tp=4), Plan(tp=2, pp=2)], ids=name)
def test_a_vocabulary_that_tp_does_not_divide(plan):
    program = program_of(gpt2(vocab_size=61), plan)
    assert folded(measure(program, 61)[0], program) == folded(expected(program), program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_follow_the_dtype(dtype):
    program = program_of(gpt2(), Plan(tp=2, pp=2), dtype)
    assert folded(measure(program, 64)[0], program) == folded(expected(program), program)


class Skips(GPT2):
    """Every block reads the embedding again, and a number that is made of it without a gradient."""

    def forward(self, input_ids):
        first = x = self.wte(input_ids)
        strongest = first.argmax(-1)
        for block in self.h:
            x = block(x + 0.1 * first) + 0.01 * strongest[..., None]
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize("plan", [Plan(pp=4), Plan(tp=2, pp=2)], ids=name)
def test_values_that_are_passed_along(plan):
    program = program_of(partial(Skips, vocab_size=64, context=16, layers=4, hidden=16, heads=4), plan)
    assert folded(measure(program, 64)[0], program) == folded(expected(program), program)


def test_partial_gradients_and_frozen_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = lm(NormedHeads, vocab=64)()
            self.model.h[0].attn.q_norm.weight.requires_grad_(False)

        def forward(self, input_ids):
            return self.model.head(self.model.norm(self.blocks(self.model.wte(input_ids))))

        def blocks(self, x):
            for block in self.model.h:
                x = block(x)
            return x

    program = program_of(Partly, Plan(tp=2, dp=2))
    assert any(spec.partial for spec in program.params.values())
    assert folded(measure(program, 64)[0], program) == folded(expected(program), program)


# The closed form


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_costs_four_all_reduces_a_layer(tp):
    """Two forward and two backward of [B, T, C] per layer and micro-batch (Shoeybi et al. 2019, section 3); besides
    them the embedding's sum forward, the head's input backward, and the cross entropy's three numbers per token."""
    layers, item = 4, 8
    program = program_of(gpt2(), Plan(tp=tp))
    found = [c for c in collectives(program) if c.group == "tp"]
    activation = MICRO * SEQ * 16 * item
    assert (
        sum(c.comm_bytes for c in found if c.when == "forward")
        == (2 * layers + 1) * activation + 3 * MICRO * SEQ * item
    )
    assert sum(c.comm_bytes for c in found if c.when == "backward") == (2 * layers + 1) * activation
    assert not [c for c in found if c.when == "step"], "no parameter of GPT-2 has partial gradients"
    _, calls = measure(program, 64)
    num_micro_batches = ROWS // MICRO
    per_step = 2  # both of the world: checksums and counts, loss and norm
    assert (
        calls[0, "all_reduce", "tp"] + calls[0, "all_reduce", "world"]
        == num_micro_batches * (4 * layers + 4) + per_step
    )


def test_a_pipeline_sends_one_activation_forward_and_one_gradient_back():
    program = program_of(gpt2(), Plan(pp=4))
    activation = MICRO * SEQ * 16 * 8
    sends = [(c.stage, c.when, c.comm_bytes) for c in collectives(program) if c.kind == "send"]
    assert sorted(sends) == sorted(
        [(s, "forward", activation) for s in range(3)] + [(s, "backward", activation) for s in range(1, 4)]
    )


def test_data_parallelism_reduces_every_gradient_once():
    program = program_of(gpt2(), Plan(dp=2))
    numbers = sum(spec.numel for spec in program.params.values())
    assert sum(c.comm_bytes for c in collectives(program) if c.group == "dp") == numbers * 8


def test_a_tied_weight_is_reduced_once_over_its_two_holders():
    program = program_of(gpt2(), Plan(pp=4))
    assert [(c.stage, c.comm_bytes) for c in collectives(program) if c.group == "tied"] == [(0, 8192), (3, 8192)]
    assert not [c for c in collectives(program_of(gpt2(tied=False), Plan(pp=4))) if c.group == "tied"]


def test_one_rank_sends_nothing():
    assert collectives(program_of(gpt2(), Plan())) == []


def test_the_same_in_the_plan_file():
    program = compile_case(ZOO["gpt2_4"], Plan(tp=2, pp=2), 1)
    rows = program.to_dict(4)["collectives"]
    assert [row["step_bytes"] for row in rows] == [c.per_step(4) for c in collectives(program)]
