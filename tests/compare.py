"""Compiled programs against plain training: ranks as threads, float64, every number compared.

    program = check(case, Plan(tp=2, pp=2), micro_batch_size=1)

`check` trains `case.build()` plainly on the whole global batch, and compiled for the plan on its ranks, and compares
the starting weights (bit-equal), and after each step the loss, every whole gradient, the gradient norm and the weights.
Ranks that hold the same values must hold the same bits. What the plan shards must be exactly what the case expects.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from threads import run_threads
from torch import Tensor, nn

import meg_compile.compiler as compiler
from meg_compile.mesh import Coords
from meg_compile.models.loss import cross_entropy
from meg_compile.plan import Plan
from meg_compile.program import Program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups

SEED, STEPS = 1234, 2
TOLERANCE = 1e-9  # relative; sums in another order differ by about 1e-13 in float64, a fault by 1e-6 and more
NEGLIGIBLE = 1e-2  # of the largest gradient: smaller ones (a key bias under softmax has none) are compared with this

Batch = dict[str, Tensor]


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all counted labels of a global batch: what training in one process would minimise."""
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


@dataclass(frozen=True)
class Case:
    """A model with its data, and what is expected of a compilation.

    build:      makes the plain model.
    batch:      the global batch of a step.
    objective:  the plain scalar that is trained, from a model and a global batch.
    loss:       the loss that the compiler gets; None where the model returns its own.
    sharded:    patterns of the parameters that every tp > 1 shards; all others stay whole.
    lr:         the learning rate.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sharded: tuple[str, ...]
    objective: Callable[[nn.Module, Batch], Tensor] = token_loss
    loss: Callable[..., Tensor] | None = cross_entropy
    lr: float = 0.1


@dataclass
class Run:
    """What a training run leaves: per step loss, norm and whole gradients, and the weights before and after it all."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)


@cache
def plain(case: Case) -> Run:
    """Train in one process on whole global batches."""
    torch.manual_seed(SEED)
    model, run = case.build().double(), Run()
    run.start = _values(model)
    for step in range(STEPS):
        model.zero_grad()
        loss = case.objective(model, case.batch(step))
        loss.backward()
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        run.losses.append(loss.item())
        run.norms.append(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt().item())
        run.grads.append(grads)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= case.lr * parameter.grad
    run.end = _values(model)
    return run


def compile_case(case: Case, plan: Plan, micro_batch_size: int) -> Program:
    """Compile from a builder, for float64, with weights that start from SEED."""
    inputs = {name: rows[:micro_batch_size] for name, rows in case.batch(0).items()}
    torch.manual_seed(SEED)
    return compiler.compile(case.build, inputs, plan, case.loss, dtype=torch.float64)


def train(case: Case, program: Program) -> tuple[Run, list[tuple[Coords, dict[str, Tensor]]]]:
    """Train a program on threads: (the run as rank 0 sees it, what each rank holds at the end)."""
    plan = program.plan
    batches = [case.batch(step) for step in range(STEPS)]
    replicas = [[_rows(batch, dp, plan.dp) for dp in range(plan.dp)] for batch in batches]
    counts = [sum(program.count(rows) for rows in of_step) for of_step in replicas]
    run = Run()

    def rank_main(rank: int):
        groups = init_groups(plan.mesh, "cpu")
        executor = Executor(program, groups, torch.device("cpu"))
        torch.distributed.barrier()  # threads share one random generator: no rank may draw while another seeds its own
        executor.load()
        torch.distributed.barrier()
        start = dict(executor.gather("value"))
        for of_step, count in zip(replicas, counts, strict=True):
            for parameter in executor.parameters.values():
                parameter.grad = None
            loss = executor.run(of_step[groups.coords.dp], program.units.scale(count))
            executor.reduce_gradients()
            mine = torch.tensor(
                [loss if groups.coords.tp == 0 else 0.0, executor.norm_squared().item()], dtype=torch.float64
            )
            torch.distributed.all_reduce(mine)
            grads = dict(executor.gather("grad"))
            if rank == 0:
                run.losses.append(mine[0].item())
                run.norms.append(mine[1].sqrt().item())
                run.grads.append(grads)
            with torch.no_grad():
                for parameter in executor.parameters.values():
                    if parameter.grad is not None:
                        parameter -= case.lr * parameter.grad
        end = dict(executor.gather("value"))
        if rank == 0:
            run.start, run.end = start, end
        return groups.coords, executor.tensors

    return run, run_threads(plan.mesh.size, rank_main)


def check(case: Case, plan: Plan, micro_batch_size: int, sharded: tuple[str, ...] | None = None) -> Program:
    """Compile, train and compare. sharded: what this plan shards, where it is not what every tp does."""
    program = compile_case(case, plan, micro_batch_size)
    wanted = case.sharded if sharded is None else sharded
    assert_sharded(program, wanted if plan.tp > 1 else ())
    assert not program.units.coupled or plan.dp * micro_batch_size == len(next(iter(case.batch(0).values())))
    run, held = train(case, program)
    assert_same(run, plain(case))
    assert_copies_agree(program, held)
    return program


def assert_same(got: Run, right: Run) -> None:
    assert set(right.start) <= set(got.start)
    for name, tensor in right.start.items():
        assert torch.equal(got.start[name], tensor), f"{name} starts otherwise than in the plain model"
    assert got.losses == [near(loss) for loss in right.losses]
    for step, (grads, wanted) in enumerate(zip(got.grads, right.grads, strict=True)):
        assert set(grads) == set(wanted)
        assert_close(grads, wanted, f"gradient of step {step}")
    assert got.norms == [near(norm) for norm in right.norms]
    assert_close({n: got.end[n] for n in right.end}, right.end, "weights")


def near(value: float) -> Any:
    return pytest.approx(value, rel=TOLERANCE, abs=1e-14)


def assert_close(got: dict[str, Tensor], right: dict[str, Tensor], what: str) -> None:
    largest = max(tensor.abs().max().item() for tensor in right.values() if tensor.numel())
    wrong = {}
    for name, tensor in right.items():
        scale = max(tensor.abs().max().item(), NEGLIGIBLE * largest, 1e-300)
        error = (got[name] - tensor).abs().max().item() / scale
        if not error <= TOLERANCE:
            wrong[name] = f"{error:.1e}"
    assert not wrong, f"{what} differ, relative to their largest entry: {wrong}"


def assert_sharded(program: Program, patterns: tuple[str, ...]) -> None:
    """Exactly the parameters that match are cut; each rank of them holds its share and no more than padding besides."""
    tp, trainable = program.plan.tp, {n: s for n, s in program.params.items() if not s.buffer}
    cut = {name for name, spec in trainable.items() if spec.sharded}
    wanted = {name for name in trainable if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert cut == wanted, f"sharded besides: {sorted(cut - wanted)}; not sharded: {sorted(wanted - cut)}"
    for name in cut:
        spec = trainable[name]
        lengths = [[-(-n // tp) if n != m else n, m] for n, m in zip(spec.shape, spec.local_shape, strict=True)]
        assert all(share == held for share, held in lengths), f"{name}: {spec.shape} as {spec.local_shape} on tp={tp}"
    for name, spec in trainable.items():
        assert spec.sharded or spec.local_shape == spec.shape, name


def assert_copies_agree(program: Program, held: list[tuple[Coords, dict[str, Tensor]]]) -> None:
    """A whole tensor is the same on every rank that has it, a shard on every rank with that tp (dp) coordinate."""
    first: dict[tuple[str, int, int], Tensor] = {}
    for coords, tensors in held:
        for name, tensor in tensors.items():
            spec = program.params[name]
            key = (name, coords.tp if spec.sharded else 0, coords.dp if program.splits(spec) else 0)
            known = first.setdefault(key, tensor)
            assert torch.equal(known, tensor), f"copies of {name} drift apart ({coords})"


def _rows(batch: Batch, dp_rank: int, dp: int) -> Batch:
    return {name: rows.chunk(dp)[dp_rank] for name, rows in batch.items()}


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
