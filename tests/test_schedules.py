"""Pipeline schedules: which numbers of micro-batches they run, in which order, and that their gradients are right."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compare import check, compile_case
from threads import run_threads
from torch import nn
from torch.distributed.pipelining import PipelineStage
from zoo import GPT, case, gpt2

from meg_compile.graph.nodes import CP, RNG, TP
from meg_compile.ops.group import Group
from meg_compile.orders import Action, make, orders
from meg_compile.plan import Plan
from meg_compile.runtime.stage import bind
from meg_compile.schedules import SCHEDULES

MEGATRON = json.loads((Path(__file__).parent / "data" / "megatron_pipelines.json").read_text())
CPU = torch.device("cpu")
SHAPES = [
    (s.name, pp, vpp) for s in SCHEDULES.values() for pp in (2, 3, 4) for vpp in ([s.vpp] if s.vpp else [1, 2, 3])
]


def depends_on(action: Action, num_stages: int) -> set[tuple[str, int, int]]:
    """What must have run before an action, with either kind of backward as "B"."""
    stage, micro = action.stage, action.micro_batch
    if action.kind == "F":
        return {("F", stage - 1, micro)} if stage else set()
    if action.kind == "W":
        return {("B", stage, micro)}
    return {("F", stage, micro)} | ({("B", stage + 1, micro)} if stage < num_stages - 1 else set())


def run_through(table, num_stages):
    """Run the ranks' actions, each as soon as it can be: the set of all that ran; what hangs is missing."""
    done, at, before = set(), [0] * len(table), -1
    while before != len(done):
        before = len(done)
        for rank, actions in enumerate(table):
            while at[rank] < len(actions) and depends_on(actions[at[rank]], num_stages) <= done:
                action = actions[at[rank]]
                done.add(("B" if action.kind == "I" else action.kind, action.stage, action.micro_batch))
                at[rank] += 1
    return done


@pytest.mark.parametrize(("name", "pp", "vpp"), SHAPES)
def test_a_schedule_runs_the_numbers_of_micro_batches_that_it_allows_and_no_others(name, pp, vpp):
    schedule = SCHEDULES[name]
    for num in range(1, 4 * pp + 3):
        if not schedule.allows(num, pp):
            with pytest.raises(ValueError, match="icrobatches"):
                orders(name, pp, vpp, num)
            continue
        table = orders(name, pp, vpp, num)
        every = {(kind, s, m) for kind in "FB" for s in range(pp * vpp) for m in range(num)}
        assert {x for x in run_through(table, pp * vpp) if x[0] != "W"} == every
        for rank, actions in enumerate(table):
            assert {a.stage for a in actions} == set(schedule.stages_of(rank, pp, vpp))
            parts = [(a.stage, a.micro_batch) for a in actions if a.kind == "I"]
            assert sorted(parts) == sorted((a.stage, a.micro_batch) for a in actions if a.kind == "W")
            assert bool(parts) <= schedule.splits


def test_the_numbers_that_are_named_work_and_none_is_closer():
    for schedule in SCHEDULES.values():
        for pp in (2, 3, 4, 8):
            for num in range(1, 5 * pp):
                near = schedule.near(num, pp)
                assert all(schedule.allows(n, pp) for n in near)
                between = range(near[0] + 1 if len(near) == 2 else 1, near[-1])
                assert not any(schedule.allows(n, pp) for n in between)


# What runs


class Recorded(nn.Module):
    """A stage y = tanh(x w), which notes when it runs forward, backward and what backward leaves for later."""

    def __init__(self, stage, log):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.stage, self.log = stage, log

    def forward(self, x):
        self.log.append(("F", self.stage))
        y = torch.tanh(x @ self.w)
        y.register_hook(lambda _: self.log.append(("I", self.stage)))
        return y

    def later(self):
        return lambda: self.log.append(("W", self.stage))


COUNTS = {1: [1, 2, 3, 4, 6], 2: [1, 2, 3, 4, 7], 4: [1, 3, 4, 6, 8, 9]}


@pytest.mark.parametrize(("name", "pp", "vpp"), [s for s in SHAPES if s[1] != 3 and s[2] < 3])
def test_torch_runs_the_order_that_is_shown_and_its_gradients_are_right(name, pp, vpp):
    rows, example = (
        torch.randn(9, 4, dtype=torch.float64),
        torch.empty(1, 4, dtype=torch.float64, device="meta", requires_grad=True),
    )
    allowed = [n for n in COUNTS[pp] if SCHEDULES[name].allows(n, pp)]

    def rank_main(rank):
        group, found = torch.distributed.group.WORLD, []
        for num in allowed:
            log = []
            modules = [Recorded(s, log) for s in SCHEDULES[name].stages_of(rank, pp, vpp)]
            stages = [
                PipelineStage(m, m.stage, pp * vpp, CPU, example, example, group=group, dw_builder=m.later)
                for m in modules
            ]
            schedule = make(name, stages, num, lambda y, target: (y - target).square().sum())
            last = {"target": rows[:num]} if any(s.is_last for s in stages) else {}
            schedule.step(*([rows[:num]] if rank == 0 else []), **last, return_outputs=False)
            found.append((log, {m.stage: m.w.grad for m in modules}))
        return found

    by_rank = run_threads(pp, rank_main)
    for at, num in enumerate(allowed):
        ran = [by_rank[rank][at] for rank in range(pp)]
        for (log, _), actions in zip(ran, orders(name, pp, vpp, num), strict=True):
            assert log == [(kind, a.stage) for a in actions for kind in {"B": "IW"}.get(a.kind, a.kind)]
        plain, y = [Recorded(s, []) for s in range(pp * vpp)], rows[:num]
        for module in plain:
            y = module(y)
        (y - rows[:num]).square().sum().backward()
        grads = {stage: grad for _, of_rank in ran for stage, grad in of_rank.items()}
        for module in plain:
            torch.testing.assert_close(grads[module.stage], module.w.grad, rtol=1e-11, atol=1e-13)


def test_orders_are_megatrons_where_rounds_are():
    """A round is pp micro-batches there, or as many as in_a_round says; here it is m / (m // pp), all rounds alike."""
    compared = 0
    for right in MEGATRON["orders"]:
        pp, vpp, num = right["pp"], right["vpp"], right["micro_batches"]
        name = "1f1b" if vpp == 1 else "interleaved_1f1b"
        if num % pp or (vpp > 1 and right["in_a_round"] != pp):
            continue
        for actions, order in zip(orders(name, pp, vpp, num), right["ranks"], strict=True):
            signs = {"F": 1, "B": -1}
            assert [signs[a.kind] * (1 + a.stage // pp) for a in actions] == list(map(int, order.split()))
        compared += 1
    assert compared == 10


# Whole programs

GPT2 = case(gpt2(layers=4, vocab_size=30), *GPT, vocab=30)


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (Plan(tp=2, pp=2, dp=2, vpp=2, schedule="looped_bfs"), 1),
        (Plan(tp=2, pp=2, dp=2, vpp=2, schedule="interleaved_zero_bubble", sp=True), 1),
        (Plan(tp=2, pp=2, vpp=2, schedule="zbv_zero_bubble"), 2),
        (Plan(pp=4, vpp=2, schedule="zbv_zero_bubble", stages="Et||t|t||t||L"), 1),
        (Plan(tp=2, pp=2, vpp=2, schedule="dualpipev", sp=True), 1),
    ],
    ids=lambda value: f"{value.schedule}-{value.mesh.size}" if isinstance(value, Plan) else "",
)
def test_every_schedule_gives_the_plain_models_numbers(plan, size):
    program = check(GPT2, plan, size)
    tied = program.params["wte.weight"]
    v = plan.schedule in ("zbv_zero_bubble", "dualpipev")
    assert program.holders(tied) == ((0,) if v else (0, plan.pp - 1)), "both ends of a V lie on one rank"


class SharedWeight(nn.Module):
    """One weight in two products, each with a bias of its own."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.weight, self.before))
        return x + F.linear(h, self.weight, self.after)


class Conv1D(nn.Module):
    """The Linear of OpenAI's GPT-2: an addmm with the weight as [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return x + torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(x.shape)


class Mixed(nn.Module):
    """Blocks of both kinds, with a frozen one between."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.h = nn.ModuleList([SharedWeight(), Conv1D(), SharedWeight(), Conv1D()])
        self.h[2].requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble"])
def test_weights_that_many_products_read_and_stages_without_any(schedule):
    check(case(Mixed, vocab=30), Plan(pp=2, vpp=2, schedule=schedule), 1)


class AddsWhole(nn.Module):
    """Parameters as large as an activation: the gradient of a product is theirs too, through views and in pieces."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.whole = nn.Parameter(torch.randn(1, 6, 16))
        self.first, self.rest = nn.Parameter(torch.randn(1, 2, 16)), nn.Parameter(torch.randn(1, 4, 16))

    def forward(self, x):
        x = self.fc(x.flatten(0, 1)).view(x.shape) + self.whole
        return self.fc(x) + torch.cat([self.first, self.rest], 1)


class AllAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.h = nn.ModuleList(AddsWhole() for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def test_gradients_that_wait_are_not_added_to():
    check(case(AllAdd, vocab=30), Plan(pp=2, vpp=2, schedule="interleaved_zero_bubble"), 1)


def test_the_gradients_of_weights_wait_and_nothing_else_does():
    program = compile_case(GPT2, Plan(pp=2, vpp=2, schedule="zbv_zero_bubble"), 1)
    stage = program.stages[1]
    tensors = {n: nn.Parameter(torch.randn(program.params[n].shape, dtype=torch.float64)) for n in stage.params}
    module = bind(stage, program.plan, tensors, {TP: Group(), CP: Group(), RNG: None}, CPU)
    module(*(torch.randn(v.shape, dtype=v.dtype) for v in stage.received)).sum().backward()
    products = {n for n in tensors if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))}
    assert {n for n, p in tensors.items() if p.grad is None} == products != set()
    assert module.later is not None
    module.later.take()()
    assert all(p.grad is not None for p in tensors.values())
