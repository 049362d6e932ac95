"""Custom autograd Functions: each keeps its own backward, and is cut where it works entry by entry."""

import pytest
import torch
from compare import check, compile_case
from torch import nn
from zoo import ENDS, PAIR, QKVO, case, lm
from zoo_layers import HIDDEN, Mlp

import meg_compile
from meg_compile.axes import Dims, unify
from meg_compile.errors import Refused
from meg_compile.plan import Plan


class Gelu(torch.autograd.Function):
    """As BLOOM's: the tanh form, with a backward written out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(0.8 * x * (1 + 0.04 * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.8 * x * (1 + 0.04 * x * x))
        return grad * (0.5 * x * (1 - t * t) * (0.8 + 0.096 * x * x) + 0.5 * (1 + t))


gelu = Gelu.apply  # how most people keep it: out of reach of whoever patches the class later


class ScaledGradient(torch.autograd.Function):
    """The identity, with a literal that backward multiplies by; newer style. No operator of forward shows it."""

    @staticmethod
    def forward(x, factor):
        return x if factor > 1 else x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Halves(torch.autograd.Function):
    """Two results, cut along the axis that would be sharded; keyword-free literals before a tensor."""

    @staticmethod
    def forward(ctx, at, x):
        ctx.at = at
        return x[..., :at] * 2, x[..., at:].clone()

    @staticmethod
    def backward(ctx, left, right):
        return None, torch.cat([3 * left, right], -1)


class Linear(torch.autograd.Function):
    """A product that knows its gradients: no rule, so its weight stays whole."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class WithGelu(Mlp):
    def forward(self, x):
        return self.fc2(gelu(self.fc1(x)))


class WithScale(Mlp):
    def forward(self, x):
        return self.fc2(torch.tanh(ScaledGradient.apply(self.fc1(x), 0.3))) + ScaledGradient.apply(x, 2.0)


class WithHalves(Mlp):
    def forward(self, x):
        left, right = Halves.apply(12, self.fc1(x))
        return self.fc2(torch.cat([left.tanh(), right], -1))


class WithLinear(Mlp):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)

    def forward(self, x):
        return super().forward(x) + Linear.apply(x, self.weight)


CASES = {
    "gelu": case(lm(mlp=WithGelu), *QKVO, *PAIR, *ENDS),
    "scaled gradient": case(lm(mlp=WithScale), *QKVO, *PAIR, *ENDS),
    "halves": case(lm(mlp=WithHalves), *QKVO, *ENDS),
    "linear": case(lm(mlp=WithLinear), *QKVO, *PAIR, *ENDS),
}


@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2, sp=True), Plan(tp=2, pp=2, recompute="full")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_its_own_backward_is_kept(name, plan):
    check(CASES[name], plan, 1)


class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WritesQuietly(Gelu):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        x.add_(1)
        return x * 2


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xs):
        return xs[0] + xs[1]

    @staticmethod
    def backward(ctx, grad):
        return None


class GivesNumber(Gelu):
    @staticmethod
    def forward(ctx, x):
        return x * 2, 3


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (lambda x: Overwrites.apply(x * 1), "Overwrites writes to what it was given"),
        (lambda x: WritesQuietly.apply(x * 1), "WritesQuietly writes to what it was given"),
        (lambda x: Sums.apply([x, x]), "Sums takes tensors in a list"),
        (lambda x: GivesNumber.apply(x)[0], "GivesNumber gives something else than tensors"),
    ],
)
def test_what_no_graph_can_keep_is_refused(called, said):
    class Calls(Mlp):
        def forward(self, x):
            return super().forward(called(x))

    with pytest.raises(Refused, match=f"the autograd.Function {said}"):
        compile_case(case(lm(mlp=Calls)), Plan(), 1)


def test_a_rule_of_the_user_lets_one_be_cut():
    @meg_compile.rule("test_functions::Linear")
    def linear(op, x, weight):
        unify(x[-1], weight[1])
        op.sum(x[-1])
        return Dims((*x[:-1], weight[0]))

    class Pair(Mlp):
        def forward(self, x):
            return self.fc2(torch.relu(Linear.apply(x, self.fc1.weight)))

    check(case(lm(mlp=Pair), *QKVO, "*.fc1.weight", "*.fc2.weight", *ENDS), Plan(tp=2), 1)
