"""What a run says of its speed: operations by the published formula, times and memory of all ranks."""

import json
import time
from functools import partial

import models
import pytest
import torch
from training import CPU, config, on_ranks

from meg_compile.compiler import compile
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan
from meg_compile.runtime.optim_faults import freeze
from meg_compile.train.loop import train
from meg_compile.train.meter import Meter, memory_bytes, peak_tflops
from meg_compile.train.timers import PHASES, Timers

B, S, L, H, V = 2, 64, 2, 48, 512
SMALL = partial(GPT2, vocab_size=V, context=S, layers=L, hidden=H, heads=4, dropout=0.0)


def flops_of(plan, frozen=()):
    ids = torch.zeros(B, S, dtype=torch.long)

    def build():
        model = SMALL()
        freeze(model, frozen)
        return model

    return compile(build, {"input_ids": ids, "labels": ids}, plan).training_flops()


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(tp=2, sp=True), Plan(pp=2, recompute="full"), Plan(cp=2)], ids=lambda plan: str(plan)
)
def test_operations_are_those_of_the_published_formula(plan):
    """Narayanan et al. 2021, equation 3, without the forward that it computes again: 72 instead of 96."""
    assert flops_of(plan) == pytest.approx(72 * B * S * L * H**2 * (1 + S / (6 * H) + V / (12 * L * H)), rel=1e-12)


def test_gradients_that_nobody_needs_are_no_work():
    """Of the first block and the table the forward alone, of the second block's first product no gradient of inputs,
    of the head's tied weight none of the weight."""
    block, head = B * S * (24 * H**2 + 4 * S * H), B * S * 2 * V * H
    assert flops_of(Plan(), ["wte", "wpe", "h.0", "h.1.ln_1"]) == block + 3 * block - B * S * 6 * H**2 + 2 * head


def test_rates_are_of_one_rank_and_its_peak():
    settings = config(plan__tp=2, plan__dp=2, log__peak_tflops=2.0)

    class Program:
        micro_batch_size = 2
        training_flops = staticmethod(lambda: 10**12)

    rates = Meter(settings, Program(), CPU, Timers(CPU)).rates(0.5, 8)  # 8 rows in micro-batches of 2 on 4 ranks
    assert rates == {"tflops_per_rank": 4 / 4 / 0.5, "mfu": 1.0}
    settings.log.peak_tflops = None
    assert Meter(settings, Program(), CPU, Timers(CPU)).rates(0.5, 8) == {"tflops_per_rank": 2.0}


def test_peaks_of_known_gpus():
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == 989 and peak_tflops("NVIDIA H100 PCIe", "bf16") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5 and peak_tflops("NVIDIA L40S", "fp16") == 362
    assert peak_tflops("NVIDIA GeForce GT 710", "bf16") is None


def test_timers_add_up_and_start_anew():
    timers = Timers(CPU)
    for _ in range(2):
        with timers("data"):
            time.sleep(0.01)
    assert 0.02 <= timers.take()["data"] < 5 and timers.take() == {}
    silent = Timers(CPU, on=False)
    with silent("data"):
        pass
    assert silent.take() == {}


def run_train(settings, run_dir):
    def work(program, executor, groups):
        return train(settings, program, executor, groups, models.FixedRows(), run_dir)

    return on_ranks(settings, work), [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_how_fast_it_was(tmp_path, capsys):
    (result, other), records = run_train(config(plan__tp=2, log__peak_tflops=0.5, train__steps=3), tmp_path)
    assert result["phase_s"] == other["phase_s"] and set(result["phase_s"]) == set(PHASES) - {"checkpoint"}
    for record in records:
        assert record["tflops_per_rank"] == pytest.approx(result["flops_per_step"] / record["step_s"] / 2e12)
        assert record["mfu"] == pytest.approx(record["tflops_per_rank"] / 0.5)
    assert ["phase_s" in record for record in records] == [False, True, True]  # log.every=2, and the last
    for low, high in [*records[1]["phase_s"].values(), records[1]["memory_bytes"], records[1]["peak_memory_bytes"]]:
        assert 0 <= low <= high
    assert sum(high for _, high in records[2]["phase_s"].values()) < 2 * records[2]["step_s"]  # two ranks' largest
    assert records[1]["memory_bytes"][1] <= records[1]["peak_memory_bytes"][1]
    assert result["mfu"] == pytest.approx(2 * result["tflops_per_rank"])
    shown = capsys.readouterr().out
    assert "MFU" in shown and "TFLOP/s per rank" in shown


def test_memory_is_counted():
    before, _ = memory_bytes(CPU)
    held = torch.ones(2**24)
    now, most = memory_bytes(CPU)
    assert now - before > 2**25 and most >= now
    del held


WANDB = """
import json, pathlib
class Run:
    def __init__(self, path): self.path = path
    def log(self, numbers, step): self.path.write_text(self.path.read_text() + json.dumps([step, numbers]) + "\\n")
    def finish(self, exit_code): self.log(exit_code, "end")
def init(project, name, dir, config):
    path = pathlib.Path(dir) / "wandb.txt"
    path.write_text(json.dumps([project, name, config["optim"]["lr"]]) + "\\n")
    return Run(path)
"""


def test_weights_and_biases_gets_the_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb.py").write_text(WANDB)
    _, records = run_train(config(log__wandb="mine", train__steps=2), tmp_path)
    start, *steps, end = (json.loads(line) for line in (tmp_path / "wandb.txt").read_text().splitlines())
    assert start == ["mine", tmp_path.name, 0.1] and end == ["end", 0]
    assert [step for step, _ in steps] == [1, 2]
    for (_, numbers), record in zip(steps, records, strict=True):
        assert (
            numbers.items() >= {name: record[name] for name in ("loss", "grad_norm", "lr", "tflops_per_rank")}.items()
        )
    assert steps[1][1]["data_s"] == records[1]["phase_s"]["data"][1]
