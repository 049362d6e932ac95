"""What one walk over a graph finds out about its axes."""

import pytest
import torch
import torch.nn.functional as F
from compare import compile_case
from torch import nn
from zoo import ZOO, case, gpt2, lm
from zoo_layers import NormedFfn

from meg_compile.axes.atoms import Dims, atoms, leaves, show, size_of
from meg_compile.axes.infer import infer
from meg_compile.axes.op import Op, rule
from meg_compile.errors import MegError
from meg_compile.graph.capture import capture
from meg_compile.plan import Plan


class Floats(nn.Module):
    """Any function of x [2, 6, 8] and of some weights, as a model that returns its loss."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, shape in weights.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(x, *(p for _, p in self.named_parameters())).square().sum()


def axes_of(function, **weights):
    """(axes, graph) of a function, captured."""
    captured = capture(Floats(function, **weights), {"x": torch.randn(2, 6, 8)}, None)
    return infer(captured.graph, captured.tensors), captured.graph


def out_of(function, name, **weights) -> Dims:
    axes, _ = axes_of(function, **weights)
    return next(op.out for op in axes.ops.values() if op.node.op == "call_function" and op.name == name)


def whole_reasons(dim) -> set[str]:
    return {atom.whole for atom in atoms(dim)}


def test_the_axes_of_gpt2_have_the_names_that_people_use():
    program = compile_case(case(gpt2()), Plan(tp=2), 2)
    named = {name: [show(dim) for dim in dims] for name, dims in program.axes.stored.items()}
    assert named["wte.weight"] == ["vocab:32", "embed:16!"]
    assert named["wpe.weight"][0] == "positions:12"
    assert named["h.0.mlp.c_fc.weight"] == ["ffn:64", "embed:16!"]
    assert named["h.0.attn.c_proj.weight"] == ["embed:16!", "heads:4 x v_head_dim:4"]
    assert named["h.0.attn.c_attn.weight"][0].startswith("(heads:4 x head_dim:4")


def test_a_view_names_the_same_axis_in_the_weight_before_it():
    axes, _ = axes_of(lambda x, w: F.linear(x, w).view(2, 6, 3, 4), w=(12, 8))
    assert [atom.size for atom in leaves(axes.stored["w"][0])] == [3, 4]


def test_both_weights_of_a_pair_share_an_axis():
    axes, _ = axes_of(lambda x, a, b: F.linear(torch.tanh(F.linear(x, a)), b), a=(12, 8), b=(8, 12))
    assert leaves(axes.stored["a"][0]) == leaves(axes.stored["b"][1])
    assert axes.stored["a"][0][0].whole is None


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("softmax", "softmax runs along it"),
        ("cumsum", "cumsum runs along it"),
        ("layer_norm", "layer_norm normalises over it"),
        ("sort", "sort has no rule"),
        ("flip", "flip has no rule"),
        ("unbind", "unbind takes it apart"),
        ("select", "select picks one entry of it"),
    ],
)
def test_what_an_operator_needs_whole_says_so(op, why):
    functions = {
        "softmax": lambda x, w: F.linear(x, w).softmax(-1),
        "cumsum": lambda x, w: F.linear(x, w).cumsum(-1),
        "layer_norm": lambda x, w: F.layer_norm(F.linear(x, w), (12,)),
        "sort": lambda x, w: F.linear(x, w).sort(-1).values,
        "flip": lambda x, w: F.linear(x, w).flip(-1),
        "unbind": lambda x, w: torch.stack(F.linear(x, w).unbind(-1)),
        "select": lambda x, w: F.linear(x, w)[..., 3],
    }
    axes, _ = axes_of(functions[op], w=(12, 8))
    assert any(reason.startswith(why) for reason in whole_reasons(axes.stored["w"][0]))


def test_an_operator_without_a_rule_keeps_all_that_it_touches_whole():
    axes, _ = axes_of(lambda x, w: torch.special.i0(F.linear(x, w)), w=(12, 8))
    (reason,) = whole_reasons(axes.stored["w"][0])
    assert reason.startswith("special_i0 has no rule (test_infer.py:")


def test_a_softmax_over_another_axis_leaves_this_one_free():
    axes, _ = axes_of(lambda x, w: F.linear(x, w).softmax(1), w=(12, 8))
    assert whole_reasons(axes.stored["w"][0]) == {None}


def test_a_sum_is_noted():
    axes, _ = axes_of(lambda x, w: F.linear(x, w).mean(-1), w=(12, 8))
    op = next(op for op in axes.ops.values() if op.name == "mean")
    assert [size_of(dim) for dim in op.summed] == [12] and op.average


def test_a_split_of_what_a_weight_makes_gives_its_rows_segments():
    axes, _ = axes_of(lambda x, w: torch.cat(F.linear(x, w).split([8, 4], -1)[::-1], -1), w=(12, 8))
    (atom,) = axes.stored["w"][0]
    assert [size_of(segment) for segment in atom.segments] == [8, 4]


def test_an_axis_that_stands_twice_in_one_tensor_is_one_axis():
    out = out_of(lambda x, w: torch.einsum("btc,cd,de->bte", x, w, w), "einsum", w=(8, 8))
    assert len(out) == 3


def test_a_norm_inside_a_pair_is_the_reason_in_the_model():
    program = compile_case(case(lm(mlp=lambda: NormedFfn("norm"))), Plan(tp=2), 2)
    reasons = whole_reasons(program.axes.stored["h.1.mlp.fc1.weight"][0])
    assert len(reasons) == 1 and next(iter(reasons)).startswith("layer_norm normalises over it")


def test_operators_register_once():
    with pytest.raises(ValueError, match="softmax has a rule already"):
        rule("softmax")(lambda op, x: x)


def test_a_rule_that_contradicts_the_capture_is_found(monkeypatch):
    from meg_compile.axes import op as registry

    monkeypatch.setitem(registry._RULES, "tanh", lambda op, x: Dims(x[:-1]))
    with pytest.raises(
        MegError, match=r"tanh \(test_infer.py:\d+\): the rule <lambda> .* says \[2, 6\], .* gives \[2, 6, 8\]"
    ):
        axes_of(lambda x: torch.tanh(x * 1.0))


def test_every_value_of_every_model_has_the_dims_of_its_shape():
    """Rules never contradict the capture: `infer` says so itself, here for every model at once, in seconds."""
    for name in ("gpt2_thirds_tied", "rotary", "experts", "two_inputs", "conv_stem", "encoder"):
        program = compile_case(ZOO[name], Plan(), 2)
        for node, op in program.axes.ops.items():
            assert isinstance(op, Op)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and node.op == "call_function":
                assert [size_of(d) for d in op.out] == list(value.shape), node


def test_inference_grows_with_depth_not_faster():
    """Equal work per layer: the number of distinct free axes of a block does not depend on how many there are."""

    def free(layers):
        program = compile_case(case(gpt2(layers=layers)), Plan(), 1)
        return len({a for dims in program.axes.stored.values() for d in dims for a in atoms(d) if a.whole is None})

    two, four, six = free(2), free(4), free(6)
    assert four - two == six - four
