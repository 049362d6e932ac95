"""Random programs compiled for tensor and pipeline parallel plans: whatever is cut, the numbers stay right."""

import random
from functools import partial
from unittest.mock import patch

import pytest
import torch

import compare
from compare import Batch, Case
from fuzz import BATCH, SEQ, VOCAB, RandomModel
from meg_compile.passes import choose
from meg_compile.plan import Plan


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (2 * BATCH, SEQ + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def micro_batch_mean(model: torch.nn.Module, rows: Batch) -> torch.Tensor:
    """A random program may mix the rows of a batch, so the plain model too takes it in micro-batches."""
    parts = zip(rows["input_ids"].split(BATCH), rows["labels"].split(BATCH), strict=True)
    return torch.stack([model(ids, labels) for ids, labels in parts]).mean()


def check_seed(seed: int, plan: Plan) -> int:
    """Compile program `seed`, its axes tried in a random order, and compare; the number of parameters that are cut."""
    case = Case(partial(RandomModel, seed), batch, (), micro_batch_mean, None)
    find = choose.find_candidates

    def shuffled(axes):
        found = find(axes)
        random.Random(seed).shuffle(found.ranked)
        return found

    with patch.object(choose, "find_candidates", shuffled if seed % 2 else find):
        program = compare.compile_case(case, plan, BATCH)
    run, held = compare.train(case, program)
    compare.assert_same(run, compare.plain.__wrapped__(case))
    compare.assert_copies_agree(program, held)
    return sum(spec.sharded for spec in program.params.values())
