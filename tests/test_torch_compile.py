"""`compile: true`: blocks that go through torch.compile compute what they compute without it.

The backend aot_eager traces and partitions as the default one does, and then runs the same operators: in float64 the
order of sums may round differently, at 1e-16, and nothing else differ.
"""

from functools import partial

import pytest
import torch
from models import FixedRows, TinyGPT
from threads import run_threads

from meg_compile.compiler import compile
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.train.batches import Batches

# torch, on itself, while it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

LAYERS, ROWS, MICRO = 2, 4, 2
TOLERANCE = 1e-12


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile makes."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield made
    torch.compiler.reset()


def step(program, compiled):
    """(loss, whole gradients) of one step."""

    def work(rank):
        executor = Executor(program, init_groups(program.plan.mesh, "cpu"), torch.device("cpu"), compiled=compiled)
        executor.load()
        torch.manual_seed(7)
        batch = Batches(FixedRows(batch=ROWS), global_batch_size=ROWS)[0]
        loss = executor.run(program.keyed(batch, 7, 0, list(range(ROWS))), 1.0)
        executor.reduce_gradients()
        return loss, dict(executor.gather("grad"))

    return run_threads(1, work)[0]


@pytest.mark.parametrize(
    ("recompute", "dropout"), [("none", "exact"), ("selective", "exact"), ("full", "exact"), ("selective", "fast")]
)
def test_losses_and_gradients_are_equal(recompute, dropout, graphs):
    torch.manual_seed(0)
    ids = torch.zeros(MICRO, 12, dtype=torch.long)
    program = compile(
        lambda: TinyGPT(layers=LAYERS, p=0.1),
        {"input_ids": ids, "labels": ids},
        Plan(recompute=recompute),
        dtype=torch.float64,
        dropout=dropout,
    )
    loss, grads = step(program, compiled=False)
    same_loss, same_grads = step(program, compiled=True)
    assert len(graphs) == LAYERS  # one a block, whole
    assert same_loss == pytest.approx(loss, rel=TOLERANCE)
    for name, grad in grads.items():
        torch.testing.assert_close(same_grads[name], grad, rtol=TOLERANCE, atol=TOLERANCE * grad.abs().max().item())
