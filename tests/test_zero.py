"""Replicas that share optimizer states, gradients and parameters: the same numbers, and no more bytes than promised."""

from dataclasses import replace
from functools import partial

import models
import pytest
import reference
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_traffic import expected, folded, gpt2, measure, program_of
from test_train import run_train
from test_verify import SETTINGS, run_verify
from torch import nn
from torch.distributed.tensor import DTensor
from training import CPU, config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.loss import cross_entropy
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.train.step import Trainer
from meg_compile.verify import verify

TIED, UNTIED = (partial(models.TinyGPT, layers=2, tied=tied) for tied in (True, False))
PLANS = [
    ({"dp": 2}, TIED),
    ({"dp": 4, "recompute": "full"}, UNTIED),
    ({"tp": 2, "dp": 2}, partial(UNTIED, layers=1)),
    ({"tp": 2, "dp": 2, "sp": True}, partial(TIED, layers=1)),
    ({"pp": 2, "dp": 2}, TIED),
    ({"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved_1f1b"}, partial(UNTIED, layers=4)),
    ({"pp": 2, "vpp": 2, "dp": 2, "schedule": "zbv_zero_bubble"}, partial(TIED, layers=4)),
    ({"cp": 2, "dp": 2}, partial(TIED, layers=1)),
]


def settings_of(zero, precision="fp64", **plan):
    changes = {f"plan__{key}": value for key, value in plan.items()}
    return config(precision=precision, plan__zero=zero, train__micro_batch_size=2, **changes, **SETTINGS)


@pytest.mark.parametrize(("plan", "factory"), PLANS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_two_steps_are_those_of_the_plain_model(plan, factory):
    """float64: loss, every gradient, the norm, and the weights after AdamW with clipping, to 1e-9; compiled once."""
    settings = settings_of(0, **plan)

    def work(program, executor, groups):
        reports = []
        for zero in (1, 2, 3):
            sharing = replace(program, plan=replace(program.plan, zero=zero))
            executor = Executor(sharing, groups, CPU)
            dist.barrier()  # threads share one random generator
            executor.load(seed=reference.SEED)
            dist.barrier()
            reports.append(
                verify(settings, sharing, executor, groups, factory, cross_entropy, models.FixedRows(), steps=2)
            )
            assert executor.split and executor.shards and executor.shards.zero == zero
        return reports

    for report in on_ranks(settings, work, factory)[0]:
        assert report.ok, report.worst()
        assert len(report.differences) > 2 * 2 * len(list(factory().parameters()))


class Odd(models.TinyGPT):
    """Rows that two replicas cannot share evenly, or that only one gets; a frozen table, a scalar, an unread weight."""

    def __init__(self):
        super().__init__(layers=1, tied=False)
        self.wpe.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1, 16))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.up, self.down = nn.Linear(16, 10), nn.Linear(10, 16)
        self.unread = nn.Parameter(torch.ones(3, 3))

    def forward(self, ids):
        x = self.wte(ids) * self.gain * self.factor + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x + self.down(self.up(x).tanh())))


@pytest.mark.parametrize(
    "plan", [{"zero": 1, "dp": 2}, {"zero": 3, "tp": 2, "dp": 2, "recompute": "selective"}], ids=str
)
def test_parameters_of_all_kinds(plan):
    report, _ = run_verify(settings_of(**plan), Odd, steps=2)
    assert report.ok, report.worst()


class Linears(nn.Module):
    """Each Linear is a block of its own: its result leaves it, and tp sums it, or takes its exponential, outside."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.down(self.up(x).relu()))


class Twice(models.TinyGPT):
    """The third block is the first one again. With four stages on two ranks, one rank reads it in two stages."""

    def __init__(self):
        super().__init__(tied=False)
        self.h[2] = self.h[0]


@pytest.mark.parametrize("factory", [Linears, Twice])
@pytest.mark.parametrize("zero", [0, 3])
def test_what_passes_between_blocks(factory, zero):
    report, _ = run_verify(settings_of(zero, tp=2, dp=2, recompute="full"), factory, steps=1)
    assert report.ok, report.worst()


def test_what_two_stages_of_a_rank_read_stays_whole():
    plan = {"pp": 2, "vpp": 2, "dp": 2, "schedule": "interleaved_1f1b"}
    report, executors = run_verify(settings_of(2, "bf16", **plan), Twice, steps=2)
    assert report.ok, report.worst()
    held = next(e for e in executors if "h.0.fc1.weight" in e.tensors)
    assert held.tensors["h.0.fc1.weight"].shape == (64, 16) and held.tensors["h.0.fc1.weight"].grad is None
    assert "h.0.fc1.weight" not in held.split and held.split


@pytest.mark.parametrize(("zero", "precision"), [(1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_half_precision(zero, precision):
    report, _ = run_verify(settings_of(zero, precision, pp=2, dp=2), TIED, steps=2)
    assert report.ok, report.worst()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_that_a_rank_holds(zero):
    """In bf16, at the moment when the optimizer has stepped: masters, gradients, two moments."""
    settings = settings_of(zero, "bf16", dp=2)

    def work(program, executor, groups):
        trainer = Trainer(settings, program, executor, groups, models.FixedRows())
        gradients = trainer.gradients(0)
        held = sum(t.untyped_storage().nbytes() for t in executor.tensors.values())
        copies = sum(t.untyped_storage().nbytes() for t in executor.copies.values())
        grads = sum(p.grad.numel() * p.grad.element_size() for p in executor.parameters.values())
        trainer.update(0, gradients.norm)
        states = [s for state in trainer.optimizer.state.values() for s in state.values() if s.dim()]
        whole = 0
        for module in executor.modules:
            for p in module.parameters():
                assert zero == 0 or isinstance(p, DTensor), "left whole"
                whole += p.to_local().numel() * 4 if isinstance(p, DTensor) else 0
        planned = sum(map(program.weight_bytes, program.params.values()))
        return held, copies, grads, sum(s.numel() * s.element_size() for s in states), whole, planned

    num = sum(p.numel() for p in TIED().parameters())  # every first dim is even
    for held, copies, grads, states, whole, planned in on_ranks(settings, work, TIED):
        share = 1 if zero == 0 else 2
        assert (held, grads, states) == (4 * num / share, 4 * num / share, 8 * num / share)
        assert copies == (2 * num if zero == 0 else 0)
        assert whole == (0 if zero == 0 else held)  # the stages read what the optimizer moves, and nothing else is kept
        assert planned == held + copies


@pytest.mark.parametrize(("zero", "whole", "grads"), [(1, 3, 3), (2, 3, 0), (3, 0, 0)])
def test_what_is_whole_between_two_micro_batches(zero, whole, grads):
    """Of three units (two blocks and the rest): with parameters, and with gradients, when the second loss is there."""
    settings = settings_of(zero, dp=2)

    def work(program, executor, groups):
        units, seen = [*executor.modules[0].blocks, executor.modules[0].body], []

        def count(*_):
            first = [next(p for p in unit.parameters() if p.dim() == 2) for unit in units[:-1]]
            first.append(dict(units[-1].named_parameters())["wte.weight"])
            plain = [p for p in first if not isinstance(p, DTensor)]
            seen.append((len(plain), sum(p.grad is not None for p in plain)))

        executor.modules[0].register_forward_hook(count)
        Trainer(settings, program, executor, groups, models.FixedRows()).gradients(0)
        return seen

    for seen in on_ranks(settings, work, TIED):
        assert seen == [(whole, 0), (whole, grads)]


@pytest.mark.parametrize(
    ("plan", "vocab"),
    [({"dp": 2, "zero": 2}, 65), *(({"tp": 2, "pp": 2, "dp": 2, "zero": zero}, 64) for zero in (1, 2, 3))],
    ids=str,
)
def test_a_step_sends_what_the_plan_says(plan, vocab):
    program = program_of(gpt2(layers=2, vocab_size=vocab), Plan(**plan), torch.bfloat16)
    assert folded(measure(program, 64)[0], program) == folded(expected(program), program)


def test_export_is_whole(tmp_path):
    files = []
    for zero in (0, 3):
        path = tmp_path / f"{zero}.safetensors"
        changes = {"plan__tp": 2, "plan__dp": 2, "plan__zero": zero}
        result = run_train(config(train__steps=2, export__path=str(path), **changes), tmp_path, factory=TIED)
        files.append(load_file(path))
    assert (
        result["num_parameters_per_rank"] == [2216] * 4
    )  # of 8,160 with a copy of the norms and biases that tp keeps whole
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, rtol=1e-12, atol=1e-12)


def test_one_replica_shares_nothing():
    report, executors = run_verify(settings_of(3), TIED, steps=1)
    assert report.ok
    assert not executors[0].split


def test_parameters_of_two_dtypes_are_refused():
    class Widened(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.low = nn.Embedding(64, 16), nn.Linear(16, 64).bfloat16()

        def forward(self, ids):
            return self.low(self.table(ids).bfloat16())

    ids = torch.zeros(2, 12, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    with pytest.raises(Refused, match=r"plan.zero=1: replicas share parameters of one dtype.*bfloat16 and float32"):
        compile(Widened(), inputs, Plan(dp=2, zero=1))
    assert compile(Widened(), inputs, Plan(dp=2)).params["low.weight"].held == torch.float32


@pytest.mark.parametrize("zero", [1, 3])
def test_an_evaluation_reads_the_weights_of_now(zero):
    """Also where the one before it has left them whole."""

    def work(program, executor, groups):
        batch = {name: torch.zeros(rows.shape, dtype=rows.dtype) for name, rows in program.inputs.items()}
        first = executor.evaluate(batch, 1.0)
        with torch.no_grad():
            torch._foreach_mul_(list(executor.parameters.values()), 0.0)
        return first, executor.evaluate(batch, 1.0)

    for first, second in on_ranks(settings_of(zero, dp=2), work, partial(UNTIED, layers=1)):
        assert first != second
