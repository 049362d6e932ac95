"""Peak memory of training steps against what the program and the published formulas predict.

N parameters, L layers, s tokens, b rows, h hidden, a heads, v vocabulary; bf16 over fp32 masters, in bytes.

A layer keeps s b h (34 + 5 a s / h) for backward (Korthikanti et al. 2022, arXiv:2205.05198, table 2): s b h (10 + 24)
outside the core of attention, and in it 5 a s^2 b. Without dropout there are no masks (2 of the 34), and the kernel of
attention keeps no core. Outside the layers it is the mask of the embedding (1), the last norm and the head (4), and the
loss (4 s b v).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.gpu.case import OPTIM, Case, rank
from benchmarks.gpu.device import Memory
from meg_compile import Program
from meg_compile.runtime.groups import Groups
from meg_compile.runtime.optimizer import build_optimizer

HELD_TOLERANCE = 0.05
"""The formula leaves out each row's mean and deviation (norms), its softmax's sum (attention) and the causal mask."""
PEAK_TOLERANCE = 0.1
"""Besides, it leaves out gradients of activations within a layer, a library's workspace and rounding to blocks."""


@dataclass(frozen=True)
class Prediction:
    """states: kept between steps, gradients apart. held: activations that wait for backward. peak: of a step."""

    states: float
    held: float
    peak: float


def predict(program: Program, case: Case) -> Prediction:
    params = [spec for spec in program.params.values() if spec.trainable]
    num = sum(program.share(spec) for spec in params)
    states = sum(map(program.weight_bytes, params)) + 8 * num  # two moments of AdamW in fp32
    gradients = 4 * num
    drops = case.dropout > 0
    sbh, logits = case.seq * case.rows * case.hidden, case.seq * case.rows * case.vocab
    scores = case.heads * case.seq**2 * case.rows if drops else 0
    outside, core = (34 if drops else 32) * sbh, 5 * scores
    kept = case.layers * {"none": outside + core, "selective": outside, "full": 2 * sbh}[case.recompute]
    held = kept + (5 if drops else 4) * sbh + 4 * logits
    # While the core of attention is computed, the block holds its input, norm, queries, keys and values (12), and of
    # every score two numbers and three hashes of 8 bytes.
    in_core = {"none": 12 * sbh - outside - core, "selective": 4 * sbh, "full": 12 * sbh}[case.recompute] + 28 * scores
    in_block = outside + core if case.recompute == "full" else 0
    head = 0 if case.recompute == "none" else 4 * case.vocab * case.hidden
    peak = max(
        held + 8 * logits,  # the loss: its gradient and that of the logits, in fp32
        kept + max(in_core, in_block) + head,  # the last block, in forward or computed again
        gradients + max(outside + core, in_core if head else 0),  # the first block in backward
    )
    return Prediction(states, held, states + peak)


def memory(case: Case, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Two steps, the second with all states there, of which the activations that are saved are counted too."""
    program = case.compile(torch.bfloat16)
    batch = program.keyed(case.batch(), 0, 0, list(range(case.rows)))
    predicted = predict(program, case)
    with Memory(device) as measured:
        executor = rank(program, groups, device, compiled=False)
        optimizer = build_optimizer(executor.parameters, OPTIM)
        for _ in range(2):
            saved = Saved([*executor.tensors.values(), *executor.copies.values()])
            with saved:
                executor.run(batch, 1 / batch["labels"].numel())
            executor.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
    held, peak = saved.num_bytes / predicted.held, measured.peak / predicted.peak
    return {
        "case": case.name,
        "states": predicted.states,
        "held": saved.num_bytes,
        "held_predicted": predicted.held,
        "peak": measured.peak,
        "peak_predicted": predicted.peak,
        "ok": abs(held - 1) <= HELD_TOLERANCE and abs(peak - 1) <= PEAK_TOLERANCE,
    }


class Saved(saved_tensors_hooks):
    """Bytes that forward saves, each storage once, without parameters and integers."""

    def __init__(self, parameters: list[torch.Tensor]):
        super().__init__(self._pack, lambda tensor: tensor)
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        self.num_bytes = 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen and tensor.dtype != torch.int64:
            self.seen.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        return tensor
