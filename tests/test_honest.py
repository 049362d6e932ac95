"""What Python does in forward is carried over, with the plain model's numbers, or refused with a reason."""

import functools
import os
import random
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from compare import check, compile_case
from torch import nn
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import ALL, case, even_tokens
from zoo_models import Lm

from meg_compile.errors import CaptureError, Refused
from meg_compile.ops.counted import exact_dropout
from meg_compile.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about what these models do


class Doing(Lm):
    """A small model that does something to its hidden state, and something when it is built."""

    def __init__(self, does: Callable, build: Callable):
        super().__init__(layers=1)
        self.does, self.cache, self.step, self.log = does, None, 0, []
        build(self)

    def hidden(self, input_ids):
        x = self.embed(input_ids)
        x = x + self.does(self, x)
        return self.norm(self.h[0](x))


def doing(does, build=lambda model: None):
    return case(partial(Doing, does, build), *ALL, batch=even_tokens)


def nothing(model, x):
    return x * 0.0


# Carried over


def no_grad(model, x):
    with torch.no_grad():
        y = model.h[0].mlp(x)
        with torch.enable_grad():
            y = y + model.h[0].mlp.fc1(x).mean()
        y = y.clone().clamp_min_(-1.0)  # written in place, which has the whole graph made anew
    return y * x


@torch.no_grad()
def scale_of(x):
    return x.abs().mean((1, 2), keepdim=True)


@functools.lru_cache
def mask_of(length):
    mask = torch.full((length, length), 0.5, dtype=torch.float64)
    mask.triu_(1)
    return mask.fill_diagonal_(2.0)


MASKS = {}


def kept_mask(model, x):
    key = x.shape[1]
    if key not in MASKS:
        MASKS[key] = torch.tril(torch.ones(key, key, dtype=x.dtype))
    return MASKS[key] @ x


def lazy_table(model, x):
    if model.cache is None:
        model.cache = torch.outer(torch.arange(12).to(model.inverse), model.inverse).cos()
        model.register_buffer("later", torch.arange(12.0)[:, None], persistent=False)
    return x * (model.cache + model.later)[: x.shape[1]].to(x.dtype)


def last_call(model, x):
    model.cache = x.detach()
    model.log.append(x.mean())
    return x * 2


def written_constant(model, x):
    weights = torch.zeros(x.shape[:2], dtype=x.dtype)
    weights[:, 0] = x[:, 0, 0]
    return weights[..., None] * x * torch.tensor([2.0]).mul_(3)


def hooks(model):
    mlp = model.h[0].mlp
    mlp.register_forward_hook(lambda module, given, out: out * 0.7)
    mlp.register_forward_pre_hook(lambda module, given: (given[0] * 1.3,))


def normed(model):
    parametrizations.weight_norm(model.h[0].mlp.fc1)
    weight_norm(model.h[0].mlp.fc2)


def compiled(model):
    model.h[0].mlp.compile()
    model.h[0].attn = torch.compile(model.h[0].attn)


def in_list(model):
    model.log = [torch.full((16,), 0.5).double(), {"deeper": torch.arange(16.0)}]
    model.parts = [model.h[0].mlp]


CARRIED = {
    "no_grad": (no_grad,),
    "no_grad function": (lambda model, x: x / scale_of(x),),
    "data": (lambda model, x: x / x.data.abs().mean((1, 2), keepdim=True),),
    "checkpoint": (lambda model, x: checkpoint(model.h[0], x, use_reentrant=False),),
    "checkpoint reentrant": (lambda model, x: checkpoint(model.h[0], x, use_reentrant=True),),
    "checkpoint sequential": (
        lambda model, x: checkpoint_sequential([*model.h, model.norm], 2, x, use_reentrant=False),
    ),
    "autocast off": (lambda model, x: autocast(x, False),),
    "lru_cache": (lambda model, x: mask_of(x.shape[1]) @ x,),
    "dict of masks": (kept_mask,),
    "lazy table": (lazy_table, lambda model: model.register_buffer("inverse", torch.arange(16.0) / 10)),
    "last call": (last_call,),
    "written constant": (written_constant,),
    "to a device": (lambda model, x: x * torch.ones(16).to(x.device, x.dtype).cpu(),),
    "forward hooks": (nothing, hooks),
    "torch.compile": (nothing, compiled),
    "tensors in a list": (lambda model, x: model.parts[0](x) * model.log[0] * model.log[1]["deeper"], in_list),
}


def autocast(x, enabled):
    with torch.autocast("cpu", torch.bfloat16, enabled):
        return F.linear(x, x[0].detach()).mean(-1, keepdim=True)


@pytest.mark.parametrize("name", CARRIED)
def test_carried_over(name):
    check(doing(*CARRIED[name]), Plan(), 4)


def test_norms_of_weights_are_carried_over():
    """Other names than those that the zoo shards: a function of a weight is whole on one rank."""
    check(case(partial(Doing, nothing, normed), batch=even_tokens), Plan(), 4)


# Refused


class Draws:
    count = 0
    generator = random.Random(0)


def drops(draw):
    """LayerDrop, as people write it."""
    return lambda model, x: x if model.training and draw() else model.h[0](x)


def numpys(name):
    def draw():
        numpy = pytest.importorskip("numpy")
        held = {"global": numpy.random, "state": STATE, "generator": GENERATOR}[name]
        return held.random() < 0.5

    return draw


STATE = sys.modules["numpy"].random.RandomState(0) if "numpy" in sys.modules else None
GENERATOR = sys.modules["numpy"].random.default_rng(0) if "numpy" in sys.modules else None
TORCHS = torch.Generator()


def counts(model, x):
    model.step += 1
    return x


def kept(model, x):
    before, model.cache = model.cache, x.detach()
    return x if before is None else x + before


def grows(model, x):
    model.log.append(1)
    return x * len(model.log)


def counts_in_class(model, x):
    Draws.count += 1
    return x * Draws.count


def first_call(model, x):
    if model.cache is None:
        model.cache = True
        return 2 * x
    return x


def noise_once(model, x):
    if model.cache is None:
        model.cache = torch.randn(16, dtype=x.dtype)
    return x * model.cache


def running(model, x):
    model.mean = model.mean * 0.9 + x.detach().mean() * 0.1
    return x


def plain_tensor(model, x):
    model.cache += 1
    return x * model.cache


def other_tensor(model, x):
    model.cache = model.cache + 1
    return x * model.cache


def new_parameter(model, x):
    if not hasattr(model, "gain"):
        model.gain = nn.Parameter(torch.ones(16, dtype=x.dtype))
    return x * model.gain


def seeds(model, x):
    torch.manual_seed(0)
    return x * torch.rand(16, dtype=x.dtype)


def forks(model, x):
    with torch.random.fork_rng():
        return x * torch.rand(16, dtype=x.dtype)


def packs(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 2 * t, lambda t: t):
        return x * x


def writes(model, x):
    with torch.no_grad():
        model.norm.weight.mul_(0.9)
    return x


def hooks_node(model, x):
    y = 2 * x
    y.grad_fn.register_hook(lambda *grads: None)
    return y


def one(model):
    model.cache = torch.ones(())


RANDOM, OTHERWISE = "random numbers of Python's or numpy's", "does something else when it is called again"
SEEDS, COUPLED = "state of torch's generator", "data-dependent"
REFUSED = {
    "random.random": (drops(lambda: random.random() < 0.5), RANDOM),
    "a Random": (drops(lambda: Draws.generator.choice([True, False])), RANDOM),
    "SystemRandom": (drops(lambda: random.SystemRandom().random() < 0.5), RANDOM),
    "secrets": (drops(lambda: secrets.randbelow(2)), RANDOM),
    "urandom": (drops(lambda: os.urandom(1)[0] < 128), RANDOM),
    "np.random": (drops(numpys("global")), RANDOM),
    "np RandomState": (drops(numpys("state")), RANDOM),
    "np Generator": (drops(numpys("generator")), RANDOM),
    "torch.rand": (drops(lambda: torch.rand(1) < 0.5), COUPLED),
    "torch.rand item": (drops(lambda: torch.rand([]).item() < 0.5), COUPLED),
    "torch.randint": (drops(lambda: int(torch.randint(0, 2, ()))), COUPLED),
    "bernoulli": (drops(lambda: torch.bernoulli(torch.tensor(0.5)).bool()), COUPLED),
    "the clock": (drops(lambda: time.time() % 1 < 0.5), "the clock"),
    "a Generator": (lambda model, x: x * torch.rand(16, generator=TORCHS), "torch.Generator"),
    "manual_seed": (seeds, SEEDS),
    "fork_rng": (forks, SEEDS),
    "a count": (counts, "changes step from 1 to 2"),
    "the call before": (kept, "an earlier call left"),
    "a list that grows": (grows, OTHERWISE),
    "a count of a class": (counts_in_class, OTHERWISE),
    "the first call": (first_call, OTHERWISE),
    "noise drawn once": (noise_once, "an earlier call left"),
    "a tensor that counts": (plain_tensor, "no buffer", one),
    "a new tensor that counts": (other_tensor, OTHERWISE, one),
    "a running mean": (running, "the buffer mean", lambda model: model.register_buffer("mean", torch.ones(()))),
    "a new parameter": (new_parameter, "the parameter gain"),
    "a parameter written": (writes, "the parameters norm.weight"),
    "an assignment to data": (lambda model, x: setattr(x, "data", x.detach()) or x, r"assignment to \.data"),
    "detach_": (lambda model, x: (2 * x).detach_(), r"y = x\.detach\(\)"),
    "saved tensors": (packs, "plan.recompute"),
    "a hook of a node": (hooks_node, "grad_fn"),
    "autocast": (lambda model, x: autocast(x, True), "torch.autocast.*precision=bf16"),
    "torch.func.grad": (lambda model, x: torch.func.grad(lambda y: (y**3).sum())(x), "torch.func"),
    "torch.vmap": (lambda model, x: torch.vmap(lambda y: 2 * y)(x), "torch.func"),
    "torch.cond": (lambda model, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "uses cond"),
    "nonzero": (lambda model, x: x * len(x[:, 0, 0].nonzero()), "known only when it runs|data-dependent"),
    "booleans as an index": (lambda model, x: x * x[x > 0].sum(), "known only when it runs"),
    "spectral norm": (nothing, "_u, .*_v", lambda model: parametrizations.spectral_norm(model.h[0].mlp.fc1)),
    "a parameter in a list": (
        lambda model, x: x * model.log[0],
        "log: holds a parameter in a plain list.*nn.ParameterList",
        lambda model: model.log.append(nn.Parameter(torch.ones(16))),
    ),
    "a module in a dict": (
        lambda model, x: model.log["a"](x),
        "log: holds a module in a plain dict.*nn.ModuleDict",
        lambda model: setattr(model, "log", {"a": nn.Linear(16, 16)}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    does, said, *build = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        compile_case(doing(does, *build), Plan(), 4)


def test_a_refusal_names_the_line():
    line = grows.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError, match=rf"test_honest\.py:{line}: {OTHERWISE}"):
        compile_case(doing(grows), Plan(), 4)


def test_a_gradient_hook_of_all_modules_is_refused():
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="hook of all modules"):
            compile_case(doing(nothing), Plan(), 4)
    finally:
        hook.remove()


def test_a_model_is_left_as_its_forward_found_it():
    def changes(model, x):
        model.h[0].eval()
        model.cache = model.new = x
        model.log.append(x)
        return x

    model = Doing(changes, lambda model: None)
    compile_case(case(lambda: model, *ALL, batch=even_tokens), Plan(), 4)
    assert model.cache is None and model.log == [] and not hasattr(model, "new") and model.h[0].training


# Dropout in place


@pytest.mark.parametrize(
    "drop",
    [
        lambda model, x: nn.Dropout(0.3, inplace=True)(2 * x),
        lambda model, x: (y := 2 * x, F.dropout(y, 0.3, inplace=True))[0],
    ],
)
def test_dropout_in_place_is_dropout(drop):
    """One draw of 0.3 of its value, which is what is read from then on."""
    program = compile_case(doing(drop), Plan(), 4)
    (drawn,) = [n for n in program.stages[0].graph.nodes if n.target is exact_dropout]
    assert drawn.args[2] == 0.3 and drawn.users and not any(n.target is exact_dropout for n in drawn.users)
    assert list(drawn.all_input_nodes[0].users) == [drawn]


@pytest.mark.parametrize("name", ["dropout1d", "alpha_dropout"])
def test_other_dropouts_are_refused_when_masks_must_be_shared(name):
    with pytest.raises(Refused, match=r"dropout=exact.*torch\.nn\.functional\.dropout"):
        compile_case(doing(lambda model, x: getattr(F, name)(x, 0.1, True)), Plan(), 4)
