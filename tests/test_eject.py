"""Ejected programs: torch alone, the plain model's numbers, readable files."""

import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import SEED, STEPS, Case, assert_close, compile_case, near, plain
from safetensors.torch import save_file
from test_t5 import SMALL as T5
from threads import run_threads
from training import config
from zoo import ZOO, case

from meg_compile import driver
from meg_compile.compiler import compile
from meg_compile.errors import Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan
from meg_compile.program import Program
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups

CPU = torch.device("cpu")
GPT = case(partial(GPT2, vocab_size=30, context=8, layers=4, hidden=16, heads=4), vocab=30)


def starting(case: Case) -> torch.nn.Module:
    torch.manual_seed(SEED)
    return case.build().double()


def write(case: Case, plan: Plan, micro_batch_size: int, folder: Path, steps: int = STEPS) -> Program:
    """Eject a case, with its starting weights and its batches beside."""
    program = compile_case(case, plan, micro_batch_size)
    batches = [case.batch(step) for step in range(steps)]
    num_rows = len(next(iter(batches[0].values())))
    program.eject(folder, num_rows // (micro_batch_size * plan.dp))
    torch.save(starting(case).state_dict(), folder / "weights.pt")
    torch.save({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, folder / "data.pt")
    return program


@contextmanager
def imported(folder: Path):
    """The ejected main module; afterwards nothing of the folder is left."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("main")
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            if str(folder) in f"{getattr(module, '__file__', '')} {getattr(module, '__path__', '')}":
                del sys.modules[name]


def whole(main, table, held, what):
    """Whole tensors from what ranks hold, [(tp_rank, {name: tensor})]; all copies of a part must be the same."""
    found = {}
    for name, spec in table["parameters"].items():
        first, runs = {}, spec["runs"]
        for tp_rank, part in [(tp_rank, tensors[name]) for tp_rank, tensors in held if name in tensors]:
            found.setdefault(name, torch.zeros(spec["shape"], dtype=torch.float64))
            assert torch.equal(first.setdefault(tp_rank if runs else 0, part), part), f"{what} {name}: copies differ"
            main.place(part, found[name], runs[tp_rank] if runs else [])
    return found


def check(case: Case, plan: Plan, micro_batch_size: int, folder: Path) -> None:
    """The ejected program, with ranks as threads, against plain training."""
    write(case, plan, micro_batch_size, folder)
    right, table = plain(case), json.loads((folder / "shards.json").read_text())
    with imported(folder) as main:
        args = main.parse(["--weights", str(folder / "weights.pt"), "--data", str(folder / "data.pt")])

        def train(_):
            rank, steps = main.Rank(CPU, args), []
            for step in range(STEPS):
                loss = rank.gradients(step)
                steps.append((loss, {n: p.grad.clone() for n, p in rank.parameters.items() if p.grad is not None}))
                torch.optim.SGD(rank.parameters.values(), lr=case.lr).step()
                for parameter in rank.parameters.values():
                    parameter.grad = None
            return rank.tp_rank, steps, {n: p.detach() for n, p in rank.parameters.items()}

        ranks = run_threads(plan.mesh.size, train)
        for step in range(STEPS):
            assert [steps[step][0] for _, steps, _ in ranks] == [near(right.losses[step])] * len(ranks)
            grads = whole(main, table, [(tp_rank, steps[step][1]) for tp_rank, steps, _ in ranks], "gradient of")
            wanted = {name: grad for name, grad in right.grads[step].items() if name in grads or grad.any()}
            assert_close(grads, wanted, f"gradient of step {step}")
        end = whole(main, table, [(tp_rank, held) for tp_rank, _, held in ranks], "weight")
        assert end.keys() == right.grads[0].keys()
        assert_close(end, {name: right.end[name] for name in end}, "weights")


CASES = {
    "t5": (T5, Plan(tp=2, pp=2, sp=True, split=1), 1),
    "interleaved": (GPT, Plan(pp=2, vpp=2, dp=2, schedule="interleaved_1f1b", recompute="full"), 1),
    "constants": (ZOO["constants"], Plan(tp=2), 4),
    "two_inputs": (ZOO["two_inputs"], Plan(tp=2, dp=2), 2),
    "vocab_101_tied": (ZOO["vocab_101_tied"], Plan(tp=4), 4),
    "experts": (ZOO["experts"], Plan(tp=2, pp=2, schedule="gpipe"), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_plain_model(name, tmp_path):
    check(*CASES[name], tmp_path / "ejected")


@pytest.mark.parametrize(
    ("dtype", "dropout", "plan"),
    [
        (torch.float64, 0.2, Plan(tp=2, pp=2, sp=True)),
        (torch.float64, 0.2, Plan(cp=3)),
        (torch.bfloat16, 0.0, Plan(tp=2, pp=2)),
    ],
    ids=str,
)
def test_it_trains_as_the_compiled_program(dtype, dropout, plan, tmp_path):
    """Dropout's masks, and gradients that reach float32 masters of bfloat16 weights."""
    build = partial(GPT2, vocab_size=30, context=8, layers=4, hidden=16, heads=4, dropout=dropout)
    batch, seed = GPT.batch(0), 7
    torch.manual_seed(SEED)
    program = compile(build, {name: rows[:1] for name, rows in batch.items()}, plan, dtype=dtype)
    program.eject(tmp_path, 4)
    torch.manual_seed(SEED)
    torch.save(build().state_dict(), tmp_path / "weights.pt")
    torch.save(batch, tmp_path / "data.pt")
    with imported(tmp_path) as main:
        where = ["--weights", str(tmp_path / "weights.pt"), "--data", str(tmp_path / "data.pt")]

        def both(_):
            executor = Executor(program, init_groups(plan.mesh, "cpu"), CPU)
            dist.barrier()
            executor.load()
            dist.barrier()
            right = executor.run(program.keyed(batch, seed, 0, list(range(4))), 1 / program.count(batch))
            executor.reduce_gradients()
            rank = main.Rank(CPU, main.parse([*where, "--seed", str(seed)]))
            return right, rank.gradients(0), executor.parameters, rank.parameters

        ranks = run_threads(plan.mesh.size, both)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2  # a gradient read twice is summed in bfloat16 or float32
    share = sum(right for right, *_ in ranks) / plan.tp
    for _, loss, right, got in ranks:
        assert loss == pytest.approx(share, rel=1e-9 if dtype == torch.float64 else 1e-6)
        for name, parameter in right.items():
            assert got[name].dtype == parameter.dtype
            torch.testing.assert_close(got[name].grad, parameter.grad, rtol=tolerance, atol=tolerance * 1e-3)


ALONE = """
import os, runpy, socket, sys
import torch.distributed.pipelining, torch.distributed.device_mesh
sys.modules["meg_compile"] = None  # an import of it fails
sys.path[0] = os.path.abspath("ejected")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
for rank in range(4):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    if os.fork() == 0:
        runpy.run_path("ejected/main.py", run_name="__main__")
        os._exit(0)
sys.exit(any([os.wait()[1] for _ in range(4)]))
"""  # what torchrun does, but torch is imported once


@pytest.mark.dist
def test_it_needs_torch_alone(tmp_path):
    """Four processes that cannot import this package, AdamW, weights in the file that people exchange."""
    folder, steps, lr = tmp_path / "ejected", 3, 1e-3
    write(GPT, Plan(tp=2, pp=2), 2, folder, steps)
    assert not any("meg_compile" in path.read_text() for path in folder.rglob("*.*") if path.suffix != ".pt")
    model = starting(GPT)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, "alone.py", "--weights", "ejected/model.safetensors", "--data", "ejected/data.pt"]
    command += ["--steps", str(steps), "--lr", str(lr), "--save", "trained.pt"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        loss = GPT.objective(model, GPT.batch(step))
        assert losses[step] == near(loss.item())  # printed with 12 digits
        loss.backward()
        optimizer.step()
    trained = torch.load(tmp_path / "trained.pt")
    assert trained.keys() == model.state_dict().keys()
    assert_close(trained, model.state_dict(), "weights")
    model.load_state_dict(trained)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    program = write(ZOO["constants"], Plan(), 4, tmp_path / "ejected")
    with pytest.raises(Refused, match=r"directory=.*ejected: is there already"):
        program.eject(tmp_path / "ejected")


def test_the_task_writes_into_the_run_directory(tmp_path, capsys):
    plain = config(plan__tp=2, explain__block=0).to_dict() | {"task": "eject"}
    result = driver.run(plain, [], tmp_path, tmp_path)
    assert (result["status"], result["path"]) == ("ok", str(tmp_path / "ejected"))
    assert (tmp_path / "ejected" / "main.py").exists() and result["path"] in capsys.readouterr().out
    plain["plan"]["recompute"] = "selective"
    (tmp_path / "other").mkdir()
    result = driver.run(plain, [], tmp_path / "other", tmp_path)
    assert result["status"] == "refused" and "plan.recompute=selective: main.py" in result["error"]


def test_equal_blocks_are_one_class(tmp_path):
    write(GPT, Plan(tp=2, pp=2), 1, tmp_path / "ejected")
    blocks, stage = ((tmp_path / "ejected" / name).read_text() for name in ("blocks.py", "stage0.py"))
    assert blocks.count("class ") == 1 and '"""h.0 to h.3."""' in blocks
    assert "for i in range(2):\n            x = self.h[i](x)" in stage
    assert "c_attn = F.linear(f_ln_1, self.attn.c_attn.weight, self.attn.c_attn.bias)" in blocks
    assert "# gpt2.py:" in blocks and "heads/2" in blocks


@pytest.mark.parametrize("name", ["t5", "interleaved"])
def test_files_pass_the_linter(name, tmp_path):
    case, plan, size = CASES[name]
    write(case, plan, size, tmp_path / "ejected")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,I,UP,B", "."]
    done = subprocess.run(command, cwd=tmp_path / "ejected", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        (Plan(recompute="selective"), "plan.recompute"),
        (Plan(dp=2, zero=1), "plan.zero"),
        (Plan(pp=2, vpp=2, schedule="zbv_zero_bubble"), "plan.schedule"),
    ],
)
def test_what_it_does_not_run_is_refused(plan, key, tmp_path):
    with pytest.raises(Refused) as refused:
        write(GPT, plan, 1, tmp_path / "ejected")
    assert [fault.key for fault in refused.value.faults] == [key]
    assert not (tmp_path / "ejected").exists()
