"""Ejected programs: torch alone, the plain model's numbers, readable files."""

import importlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import STEPS, Case, assert_close, compile_case, near, plain
from models import TinyGPT
from test_t5 import SMALL as T5
from threads import run_threads
from zoo import ZOO, case

from meg_compile.errors import Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan

CPU = torch.device("cpu")
GPT = case(partial(GPT2, vocab_size=30, context=8, layers=4, hidden=16, heads=4), vocab=30)


def write(case: Case, plan: Plan, micro_batch_size: int, folder: Path):
    """Eject a case, with its starting weights and its batches beside. Returns the program."""
    program = compile_case(case, plan, micro_batch_size)
    batches = [case.batch(step) for step in range(STEPS)]
    num_rows = len(next(iter(batches[0].values())))
    program.eject(folder, num_rows // (micro_batch_size * plan.dp))
    torch.save(program_weights(case), folder / "weights.pt")
    torch.save({name: torch.cat([b[name] for b in batches]) for name in batches[0]}, folder / "data.pt")
    return program


def program_weights(case: Case):
    from compare import SEED

    torch.manual_seed(SEED)
    return case.build().double().state_dict()


@contextmanager
def imported(folder: Path):
    """The ejected main module; afterwards nothing of it is left."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("main")
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", None) or getattr(sys.modules[name], "__path__", "")):
                del sys.modules[name]


def whole(main, table, held, kind):
    """The whole tensors of what ranks hold, [(tp_rank, {name: tensor})], each copy like the others."""
    found = {}
    for name, spec in table["parameters"].items():
        parts = [(tp, tensors[name]) for tp, tensors in held if name in tensors]
        if not parts:
            continue
        found[name] = torch.zeros(spec["shape"], dtype=torch.float64)
        first = {}
        for tp, part in parts:
            assert torch.equal(first.setdefault(tp if spec["runs"] else 0, part), part), f"{kind} {name}: copies differ"
            main.place(part, found[name], spec["runs"][tp] if spec["runs"] else [])
    return found


def check(case: Case, plan: Plan, micro_batch_size: int, folder: Path):
    """The ejected program, on threads, against plain training."""
    write(case, plan, micro_batch_size, folder)
    right, table = plain(case), json.loads((folder / "shards.json").read_text())
    with imported(folder) as main:
        args = main.parse(["--weights", str(folder / "weights.pt"), "--data", str(folder / "data.pt")])

        def train(_):
            rank, steps = main.Rank(CPU, args), []
            for step in range(STEPS):
                loss = rank.gradients(step)
                grads = {n: p.grad.clone() for n, p in rank.parameters.items() if p.grad is not None}
                steps.append((loss, grads))
                with torch.no_grad():
                    for parameter in rank.parameters.values():
                        if parameter.grad is not None:
                            parameter -= case.lr * parameter.grad
                            parameter.grad = None
            return rank.tp_rank, steps, {n: t.detach() for n, t in rank.parameters.items()}

        ranks = run_threads(plan.mesh.size, train)
        for step in range(STEPS):
            assert [steps[step][0] for _, steps, _ in ranks] == [near(right.losses[step])] * len(ranks)
            grads = whole(main, table, [(tp, steps[step][1]) for tp, steps, _ in ranks], "gradient of")
            wanted = {n: g for n, g in right.grads[step].items() if n in grads or g.any()}
            assert_close(grads, wanted, f"gradient of step {step}")
        end = whole(main, table, [(tp, held) for tp, _, held in ranks], "weight")
        assert_close(end, {n: right.end[n] for n in end}, "weights")
        assert end.keys() == right.grads[0].keys()
    for path in folder.rglob("*.py"):
        assert "meg_compile" not in path.read_text(), path


CASES = {
    "gpt-tp2-pp2": (GPT, Plan(tp=2, pp=2), 1),
    "t5-tp2-pp2-sp": (T5, Plan(tp=2, pp=2, sp=True, split=1), 1),
    "gpt-vpp2-dp2": (GPT, Plan(pp=2, vpp=2, dp=2, schedule="interleaved_1f1b"), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_plain_model(name, tmp_path):
    check(*CASES[name], tmp_path / "ejected")
