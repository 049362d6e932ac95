"""Random programs compiled for tensor and pipeline parallel plans: whatever is cut, the numbers stay right."""

import random
from functools import partial
from unittest.mock import patch

import compare
import pytest
import torch
from compare import Batch, Case
from fuzz import BATCH, SEQ, VOCAB, RandomModel

from meg_compile.passes import choose
from meg_compile.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")  # torch's, where a graph is functionalised


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
    case = Case(partial(RandomModel, seed), batch, (), micro_batch_mean, None, lr=1e-4)
    find = choose.find_candidates

    def shuffled(axes):
        found = find(axes)
        random.Random(seed).shuffle(found.ranked)
        return found

    with patch.object(choose, "find_candidates", shuffled if seed % 2 else find):
        program = compare.compile_case(case, plan, BATCH)
    program.units.coupled = ""  # the plain model takes the same micro-batches
    run, held = compare.train(case, program)
    compare.assert_same(run, compare.plain.__wrapped__(case))
    compare.assert_copies_agree(program, held)
    return sum(spec.sharded for name, spec in program.params.items() if name.startswith("h."))


PLANS = [Plan(tp=2, strict=False), Plan(tp=4, strict=False), Plan(tp=2, pp=2, strict=False)]


@pytest.mark.parametrize(
    ("plan", "first"),
    [
        *((PLANS[0], first) for first in range(0, 20, 5)),
        *((PLANS[1], first) for first in range(20, 30, 5)),
        *((PLANS[2], first) for first in range(30, 40, 5)),
    ],
    ids=lambda value: f"tp{value.tp}-pp{value.pp}" if isinstance(value, Plan) else f"seed{value}",
)
def test_random_programs(plan, first):
    cut = []
    for seed in range(first, first + 5):
        try:
            cut.append(check_seed(seed, plan))
        except BaseException as error:
            error.add_note(f"program of seed {seed}:\n{described(seed)}")
            raise
    assert sum(map(bool, cut)) >= 2, f"seeds from {first}: hardly anything is cut, {cut}"


@pytest.mark.parametrize("seed", [2, 24, 1047])
def test_programs_that_were_wrong_once(seed):
    """A value times itself; numbers picked by a list; an axis of the batch that weights make and contract."""
    check_seed(seed, PLANS[0])


def described(seed: int) -> str:
    torch.manual_seed(compare.SEED)
    return RandomModel(seed).describe()
