"""An index outside its vocabulary is an error at every tp: on shards it would look like a row of another rank."""

import pytest
import torch
from models import TinyGPT, fixed_batch
from threads import run_threads

from meg_compile.compiler import compile
from meg_compile.errors import MegError
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("field", "value"), [("input_ids", 64), ("input_ids", -1), ("labels", 64), ("labels", -1)])
def test_an_index_outside_the_vocabulary_is_an_error(tp, field, value):
    ids, labels = fixed_batch(0)
    batch = {"input_ids": ids.clone(), "labels": labels.clone()}
    program = compile(TinyGPT, {name: rows[:2] for name, rows in batch.items()}, Plan(tp=tp))

    def work(_):
        executor = Executor(program, init_groups(program.plan.mesh, "cpu"), torch.device("cpu"))
        executor.load()
        executor.run(batch, 1.0)
        batch["labels"][0, 0] = -100
        executor.run(batch, 1.0)
        bad = batch | {field: batch[field].clone()}
        bad[field][3, 2] = value
        with pytest.raises(MegError, match=rf"{field} holds {value}, and the model has 64"):
            executor.run(bad, 1.0)

    run_threads(tp, work)
