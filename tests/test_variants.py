"""Other batch sizes, other lengths and evaluation, on the weights of one executor; what fits nothing is refused."""

import pytest
import torch
from compare import compile_case, token_loss
from models import TinyGPT
from threads import run_threads
from torch import nn
from zoo import ALL, case, even_tokens

from meg_compile.errors import MegError
from meg_compile.plan import Plan
from meg_compile.runtime.executor import Executor
from meg_compile.runtime.groups import init_groups
from meg_compile.runtime.variants import Variants


class Modal(TinyGPT):
    """A constant of another size for each length and each mode, which capture calls alike."""

    def __init__(self):
        super().__init__(vocab=32, layers=2)

    def forward(self, ids):
        weights = [1.0, 2.0] * (ids.shape[1] // 2) if self.training else [3.0] * ids.shape[1]
        return super().forward(ids) * torch.tensor(weights)[:, None]


CASE = case(Modal, *ALL, batch=even_tokens)


def rows(num_rows, length):
    ids = torch.arange(num_rows * length).view(num_rows, length) * 7 % 32
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def plain(batch, training):
    torch.manual_seed(1234)
    model: nn.Module = CASE.build().double().train(training)
    loss = token_loss(model, batch)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def on_threads(program, work):
    def rank_main(_):
        groups = init_groups(program.plan.mesh, "cpu")
        executor = Executor(program, groups, torch.device("cpu"))
        torch.distributed.barrier()
        executor.load()
        torch.distributed.barrier()
        return work(executor)

    return run_threads(program.plan.mesh.size, rank_main)


def test_variants_are_made_when_they_are_met():
    def work(executor):
        variants = Variants(executor)
        for num_rows, length in ((3, 6), (4, 4)):
            batch = rows(num_rows, length)
            for training in (False, True):
                loss, grads = plain(batch, training)
                variant = variants.of(batch, training)
                scale = 1 / variant.program.count(batch)
                assert variant.evaluate(batch, scale) == pytest.approx(loss, rel=1e-12)
                if training:
                    executor.parameters["wte.weight"].grad = None
                    variant.run(batch, scale)
                    grad = executor.parameters["wte.weight"].grad
                    torch.testing.assert_close(grad, grads["wte.weight"], rtol=1e-9, atol=1e-12)
        assert variants.of(rows(8, 4), True) is variants.of(rows(2, 4), True)

    on_threads(compile_case(CASE, Plan(), 2), work)


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(pp=2)], ids=str)
def test_a_variant_is_cut_as_its_program(plan):
    program = compile_case(CASE, plan, 2)
    batch = rows(4, 4)
    variant = program.variant({name: values[:2] for name, values in batch.items()})
    assert [stage.layers for stage in variant.stages] == [stage.layers for stage in program.stages]
    right, _ = plain(batch, False)

    def work(executor):
        other = Executor(variant, executor.groups, executor.device, tensors=executor.tensors)
        return other.evaluate(batch, 1 / variant.count(batch)), executor.groups.coords.pp

    losses = [loss for loss, pp in on_threads(program, work) if pp == plan.pp - 1]
    assert losses == pytest.approx([right] * plan.tp, rel=1e-12)


def test_weights_that_are_cut_otherwise_are_not_lent():
    whole = compile_case(CASE, Plan(), 2)

    def work(executor):
        del executor.tensors["h.0.fc1.weight"]
        with pytest.raises(MegError, match=r"h\.0\.fc1\.weight is not lent"):
            Executor(whole, executor.groups, executor.device, tensors=executor.tensors)

    on_threads(whole, work)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (rows(3, 6), "3 rows do not divide into micro-batches of 2"),
        (rows(0, 6), "0 rows"),
        (rows(2, 4), r"field input_ids has rows of torch\.int64 \[4\], not torch\.int64 \[6\]"),
        ({"input_ids": rows(2, 6)["input_ids"]}, "no field labels"),
        (rows(2, 6) | {"labels": rows(4, 6)["labels"]}, "different numbers of rows"),
        (rows(2, 6) | {"labels": rows(2, 6)["labels"].float()}, "field labels has rows of torch.float32"),
    ],
    ids=["rows", "none", "length", "field", "fields", "dtype"],
)
def test_rows_of_another_shape_are_refused(batch, said):
    program = compile_case(CASE, Plan(), 2)
    with pytest.raises(MegError, match=said):
        program.check(batch)
