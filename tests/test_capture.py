"""From a plain model to a graph: what is bound, what is kept, what is refused in the user's own words."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from compare import check, compile_case
from torch import nn
from zoo import ALL, ZOO, case, even_tokens, lm, tokens
from zoo_layers import Mlp
from zoo_models import Lm, OwnLoss

from meg_compile.compiler import compile
from meg_compile.errors import CaptureError
from meg_compile.graph.capture import bind, capture
from meg_compile.graph.nodes import base_name
from meg_compile.models.loss import cross_entropy
from meg_compile.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")  # torch's, where a graph is functionalised


def batch(rows=2):
    return {name: value[:rows] for name, value in tokens(0).items()}


def capture_of(model, inputs=None, loss=cross_entropy):
    return capture(model, inputs or batch(), loss)


def ops(captured):
    return [base_name(n.target) for n in captured.graph.nodes if n.op == "call_function"]


class Hooked(Lm):
    """A small model whose hidden state goes through a function of the test's."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(layers=1)
        self.function = function

    def hidden(self, input_ids):
        return self.function(super().hidden(input_ids))


# What a graph would drop or freeze


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def registers_hook(x):
    x.register_hook(lambda grad: 2 * grad)
    return x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Noise.apply, "the autograd.Function Noise draws random numbers"),
        (registers_hook, "register_hook"),
        (lambda x: x * random.random(), "random"),
        (lambda x: x * random.randint(1, 9), "random"),
        (lambda x: x * random.uniform(0.0, 1.0), "random"),
        (lambda x: x * random.choice([1.0, 2.0]), "random"),
        (lambda x: x if random.gauss(0, 1) > 0 else 2 * x, "random"),
        (lambda x: x * random.sample([1.0, 2.0], 1)[0], "random"),
    ],
    ids=["function that draws", "hook", "random", "randint", "uniform", "choice", "gauss", "sample"],
)
def test_what_a_graph_would_lose_or_freeze_is_refused(function, said):
    with pytest.raises(CaptureError, match=said):
        capture_of(Hooked(function))


def test_numpy_random_numbers_are_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CaptureError, match="random"):
        capture_of(Hooked(lambda x: x * float(numpy.random.rand())))


def test_a_backward_hook_of_a_module_is_refused():
    model = Lm(layers=1)
    model.h[0].mlp.register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(CaptureError, match=r"module h\.0\.mlp: uses a gradient hook"):
        capture_of(model)


def test_a_gradient_hook_of_a_parameter_is_refused():
    """Set before capture, so nothing is called during it that could be caught."""
    model = Lm(layers=1)
    model.norm.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(CaptureError, match="hook"):
        capture_of(model)


def test_torch_random_numbers_are_not_frozen():
    """Noise stays an operator of the graph, drawn anew in every step."""
    captured = capture_of(Hooked(lambda x: x + torch.randn_like(x)))
    assert "randn_like" in ops(captured)


# What stops a capture, in the model's words


class Short(Lm):
    def forward(self, input_ids):
        if input_ids.shape[1] > 4:
            raise ValueError(f"a sequence of {input_ids.shape[1]} tokens is longer than 4")
        return super().forward(input_ids)


class Branches(Lm):
    def forward(self, input_ids):
        x = self.hidden(input_ids)
        if x.sum() > 0:
            x = 2 * x
        return self.head(x)


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_an_error_of_the_model_is_shown_with_its_line():
    with pytest.raises(CaptureError) as caught:
        capture_of(Short())
    text = str(caught.value)
    assert "a sequence of 6 tokens is longer than 4" in text
    assert f"test_capture.py:{line_of('raise ValueError(f')}" in text


def test_a_branch_on_data_is_shown_with_its_line():
    with pytest.raises(CaptureError) as caught:
        capture_of(Branches())
    assert f"test_capture.py:{line_of('if x.sum() > 0')}" in str(caught.value)


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(pp=2)], ids=["tp", "pp"])
def test_an_item_of_data_is_a_number_without_a_gradient_or_refused(plan):
    class Item(Lm):
        def hidden(self, input_ids):
            x = super().hidden(input_ids)
            return x * (1 + 0.1 * x.sum().item())

    try:
        compile_case(case(Item), plan, 2)
    except CaptureError as error:
        assert ".py:" in str(error) and ".item()" in str(error)
    else:
        check(case(Item, *ALL, batch=even_tokens, objective=micro_batch_loss), plan, 2)


def micro_batch_loss(model, rows):
    parts = zip(rows["input_ids"].split(2), rows["labels"].split(2), strict=True)
    return torch.stack([cross_entropy(model(ids), labels) for ids, labels in parts]).mean()


def test_a_failing_assert_is_shown_with_its_text():
    class Asserts(Lm):
        def forward(self, input_ids):
            assert input_ids.shape[1] == 5, "five tokens, please"
            return super().forward(input_ids)

    with pytest.raises(CaptureError, match="five tokens, please"):
        capture_of(Asserts())


def test_asserts_on_shapes_leave_nothing_in_the_graph():
    ids = torch.zeros(2, 12, dtype=torch.long)
    captured = capture_of(models.AssertNet(), {"input_ids": ids, "labels": ids})
    assert not any("assert" in name for name in ops(captured))


def test_a_model_in_evaluation_mode_is_captured_for_training_and_left_as_it_was():
    class Modal(Lm):
        def hidden(self, input_ids):
            x = super().hidden(input_ids)
            return torch.tanh(x) if self.training else x

    model = Modal(layers=1).eval()
    assert "tanh" in ops(capture_of(model))
    assert not model.training and not model.h[0].training


# Fields


@pytest.mark.parametrize(
    ("forward", "fields", "binding"),
    [
        (lambda input_ids: 0, ("input_ids", "labels"), {"input_ids": "input_ids"}),
        (lambda ids: 0, ("input_ids", "labels"), {"input_ids": "ids"}),
        (lambda idx, targets=None: 0, ("input_ids", "labels"), {"input_ids": "idx"}),
        (lambda input_ids, labels=None: 0, ("input_ids", "labels"), {"input_ids": "input_ids", "labels": "labels"}),
        (lambda x, y: 0, ("x", "y", "z"), {"x": "x", "y": "y"}),
        (lambda ids, mask: 0, ("input_ids", "mask", "sample_id"), {"input_ids": "ids", "mask": "mask"}),
        (lambda *, input_ids, mask=None: 0, ("input_ids", "mask"), {"input_ids": "input_ids", "mask": "mask"}),
        (lambda labels, ids=None: 0, ("input_ids", "labels"), {"labels": "labels"}),
    ],
)
def test_fields_go_to_the_parameters_of_forward(forward, fields, binding):
    class Model(nn.Module):
        pass

    model = Model()
    model.forward = forward
    assert bind(model, dict.fromkeys(fields)) == binding


@pytest.mark.parametrize(
    ("forward", "fields", "said"),
    [
        (lambda ids, mask: 0, ("input_ids", "labels"), "mask"),
        (lambda x, y: 0, ("a", "b"), "x, y"),
        (lambda: 0, ("input_ids",), "input_ids"),
    ],
)
def test_what_forward_takes_and_no_field_gives_is_refused(forward, fields, said):
    class Model(nn.Module):
        pass

    model = Model()
    model.forward = forward
    with pytest.raises(CaptureError, match=said) as caught:
        bind(model, dict.fromkeys(fields))
    assert "Model.forward" in str(caught.value) and fields[0] in str(caught.value)


def test_fields_that_nobody_reads_are_left_out():
    captured = capture_of(Lm(layers=1), batch() | {"sample_id": torch.arange(2)})
    assert captured.fields == ("input_ids", "labels")
    assert [n.target for n in captured.graph.nodes if n.op == "placeholder"] == ["input_ids", "labels"]


def test_logits_without_labels_are_refused():
    with pytest.raises(CaptureError, match="labels"):
        capture_of(Lm(layers=1), {"input_ids": batch()["input_ids"]})


def test_labels_without_a_loss_are_refused():
    with pytest.raises(CaptureError, match="loss"):
        capture_of(Lm(layers=1), loss=None)


@pytest.mark.parametrize("kind", ["scalar", "dict", "tuple", "dataclass"])
def test_a_loss_of_the_models_own_is_found(kind):
    captured = capture_of(OwnLoss(kind, layers=1), loss=None)
    output = next(n for n in captured.graph.nodes if n.op == "output")
    assert base_name(output.args[0].target) == "cross_entropy_loss"


# What is kept


def test_names_are_the_users_and_tied_weights_stand_once():
    captured = capture_of(Lm(layers=1, tied=True))
    assert captured.aliases == {"head.weight": "wte.weight"}
    assert "wte.weight" in captured.tensors and "head.weight" not in captured.tensors
    assert {n.target for n in captured.graph.nodes if n.op == "get_attr"} <= set(captured.tensors)


def test_buffers_keep_their_names():
    captured = capture_of(ZOO["masked"].build())
    assert {"h.0.attn.mask", "h.1.attn.mask"} <= captured.buffers


def test_a_model_is_left_as_it_was():
    model = Lm(layers=1, tied=True)
    before = {name: (id(p), p.clone(), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    compile(model, batch(), Plan(tp=2))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    for name, (identity, value, gradient) in before.items():
        assert id(after[name]) == identity and torch.equal(after[name], value)
        assert after[name].requires_grad == gradient and after[name].grad is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model.training and model.h[0].mlp.fc1.weight.device.type == "cpu"


def test_a_real_model_a_meta_model_and_a_builder_give_one_program():
    build = partial(Lm, layers=1)
    with torch.device("meta"):
        meta = build()
    texts = {str(compile(model, batch(), Plan(tp=2)).stages[0].graph) for model in (build(), meta, build)}
    assert len(texts) == 1


def test_the_generator_is_left_where_it_was():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    compile(partial(Lm, layers=1), batch(), Plan(tp=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_that_drops_nothing_is_removed():
    class Dropout(Mlp):
        def forward(self, x):
            return F.dropout(self.fc2(F.dropout(F.gelu(self.fc1(x)), 0.0)), 0.1)

    captured = capture_of(lm(mlp=Dropout, layers=1)())
    assert ops(captured).count("dropout") == 1


def test_in_place_operators_become_others():
    captured = capture_of(ZOO["in_place"].build())
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in captured.graph.nodes)
    check(ZOO["in_place"], Plan(tp=2), 2)


def test_a_custom_operator_with_its_own_backward_is_kept():
    """The way out that a refusal names."""

    @torch.library.custom_op("meg_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda ctx, grad: 2 * grad)
    check(case(partial(Hooked, twice), *ALL), Plan(tp=2), 2)


def test_a_buffer_that_forward_writes_to_is_refused():
    """State that a step changes (a running mean) is no part of a pure graph: it must not be lost in silence."""

    class Running(Lm):
        def __init__(self):
            super().__init__(layers=1)
            self.register_buffer("mean", torch.zeros(16))

        def hidden(self, input_ids):
            x = super().hidden(input_ids)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return x - self.mean

    with pytest.raises(CaptureError, match=r"mean|buffer|state"):
        capture_of(Running())


def test_batch_norm_is_refused():
    """Its statistics are the whole batch's, which no rank and no micro-batch sees, and its running ones are state."""

    class Normed(Lm):
        def __init__(self):
            super().__init__(layers=1)
            self.batch = nn.BatchNorm1d(16)

        def hidden(self, input_ids):
            return self.batch(super().hidden(input_ids).transpose(1, 2)).transpose(1, 2)

    with pytest.raises(CaptureError, match=r"batch|buffer|state"):
        capture_of(Normed())


def test_a_loss_with_parameters_is_refused():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, logits, labels):
            return cross_entropy(logits * self.weight, labels)

    with pytest.raises(CaptureError, match=r"loss=Weighted: has parameters.*a part of the model"):
        capture_of(Lm(layers=1), loss=Weighted())


def test_the_loss_must_be_one_number():
    with pytest.raises(CaptureError):
        capture_of(Lm(layers=1), loss=lambda logits, labels: logits.mean(-1))


def test_a_program_from_a_ready_model_has_its_weights():
    torch.manual_seed(0)
    model = ZOO["separate"].build()
    program = compile_case(ZOO["separate"], Plan(), 2)
    assert set(dict(model.named_parameters())) == {n for n, s in program.params.items() if not s.buffer}
