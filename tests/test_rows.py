"""A loss is cut into micro-batches and replicas only where the rows of a batch do not see each other in it."""

from functools import partial

import models
import pytest
import torch
import torch.nn.functional as F
from compare import Case, check, compile_case
from fuzz import BATCH, SEQ, VOCAB, RandomModel
from torch import nn
from training import config, on_ranks

from meg_compile.compiler import compile
from meg_compile.errors import MegError, Refused
from meg_compile.graph.capture import capture
from meg_compile.passes.rows import judge
from meg_compile.plan import Plan
from meg_compile.prepare import coupling_faults, unclear_faults
from meg_compile.train.step import Trainer

ROWS, WIDTH = 4, 8


class Small(nn.Module):
    """Vectors x [B, 8] through a Linear, and a loss of them, y [B] (floats) and keep [B] (0 or 1)."""

    def __init__(self, loss):
        super().__init__()
        self.map, self.of = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x, y, keep):
        return self.of(self.map(x), y, keep)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, WIDTH, generator=generator).double(), torch.randn(ROWS, generator=generator).double()
    return {"x": x, "y": y, "keep": torch.tensor([1, 0, 1, 1])}


def case(loss):
    return Case(partial(Small, loss), batch, (), lambda model, rows: model(**rows), None)


def contrastive(z, y, keep):
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def paired(z, y, keep):
    n = F.normalize(z, dim=-1)
    return -(F.linear(n, n).diagonal() - torch.logsumexp(n @ n.mT, -1)).mean()


def by_expert(z, y, keep, back=True, of_all=False, group=2):
    """Entries sorted by an expert of their own, scaled by what belongs to each, and put back."""
    scales = torch.linspace(1, 2, 4, dtype=z.dtype)
    keys, order = torch.sort(((z > 0).long().sum(-1, keepdim=True) % 4).expand(-1, group).reshape(-1))
    out = z[order // 2].tanh() * scales[keys][:, None]
    if of_all:
        out = out.cumsum(0)
    if back:
        undo = torch.empty_like(order)
        undo[order] = torch.arange(len(order))
        out = out[undo]
    return (out.view(len(z), group, -1).sum(1) * y[:, None]).square().mean()


COUPLED = {
    "contrastive": (contrastive, "mm|matmul|linear"),
    "paired": (paired, "linear|matmul"),
    "centred": (lambda z, y, keep: (z - z.mean(0)).square().mean(), "sub"),
    "deviation": (lambda z, y, keep: z.std(0).mean(), "std"),
    "largest": (lambda z, y, keep: z.sum(-1).max(), "max"),
    "ratio": (lambda z, y, keep: z.square().mean() / z.abs().mean(), "div"),
    "product": (lambda z, y, keep: z.mean() * y.mean(), "mul"),
    "root": (lambda z, y, keep: z.square().mean().sqrt(), "sqrt"),
    "softmax": (lambda z, y, keep: (z.softmax(0) * y[:, None]).mean(), "softmax"),
    "sorted": (lambda z, y, keep: (z.sum(-1).sort().values * y).mean(), "sort"),
    "not put back": (partial(by_expert, back=False), "reshape"),
    "sorted scan": (partial(by_expert, of_all=True), "cumsum"),
    "other rows' order": (partial(by_expert, group=1), "index"),
    "scan": (lambda z, y, keep: z.cumsum(0).square().mean(), "cumsum"),
    "pairs": (lambda z, y, keep: (z[:, None] - z[None]).square().mean(), "sub"),
    "distances": (lambda z, y, keep: torch.cdist(z, z).mean(), "cdist"),
    "neighbour": (lambda z, y, keep: (z - z.roll(1, 0)).square().mean(), "roll"),
    "first": (lambda z, y, keep: z[0].square().mean(), "select"),
    "half": (lambda z, y, keep: z[: len(z) // 2].square().mean(), "slice"),
    "by place": (lambda z, y, keep: (z * torch.arange(len(z))[:, None]).mean(), "mul"),
    "gram": (lambda z, y, keep: (z.T @ z).square().mean(), "square|pow"),
    "attended": (lambda z, y, keep: F.scaled_dot_product_attention(z, z, z).mean(), "attention"),
    "batch norm": (lambda z, y, keep: F.batch_norm(z, None, None, training=True).square().mean(), "batch_norm"),
    "weights of classes": (
        lambda z, y, keep: F.cross_entropy(z, keep, weight=torch.linspace(1, 2, 8, dtype=z.dtype)),
        "cross_entropy",
    ),
    "mean and sum": (lambda z, y, keep: z.mean() + z.sum(), "sum"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_rows_needs_the_whole_batch(name):
    loss, operator = COUPLED[name]
    with pytest.raises(Refused, match=r"plan\.dp=2: the loss couples the rows of a batch \(.*use plan\.dp=1 and"):
        compile(Small(loss).double(), {n: rows[:2] for n, rows in batch(0).items()}, Plan(dp=2), None)
    program = compile_case(case(loss), Plan(), 2)
    if name != "mean and sum":
        assert operator.split("|")[0] and any(word in program.units.coupled for word in operator.split("|"))
        assert "test_rows.py:" in program.units.coupled
    with pytest.raises(MegError, match=r"plan\.dp=1 and a train\.micro_batch_size of the whole"):
        program.count(batch(0))
    (fault,) = coupling_faults(config(train__micro_batch_size=2, train__global_batch_size=8), program)
    assert "plan.dp=1 and train.micro_batch_size=8" in fault.fix and fault.key == "train.micro_batch_size"
    assert not coupling_faults(config(train__micro_batch_size=8, train__global_batch_size=8), program)


@pytest.mark.parametrize("name", ["contrastive", "centred", "largest", "ratio", "weights of classes"])
def test_the_whole_batch_is_right(name):
    check(case(COUPLED[name][0]), Plan(), ROWS)


def one_row_only(z, y, keep):
    at = keep + torch.arange(2)[:, None]
    return z[torch.arange(len(z)), at].square().mean()


class Placed(nn.Module):
    """Positions and token types that are the same for every row, made as tensors of a row each."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(16, WIDTH), nn.Embedding(SEQ + 2, WIDTH)
        self.register_buffer("kinds", torch.zeros(1, 2 * SEQ, dtype=torch.int64), persistent=False)
        self.kind, self.head = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, input_ids):
        rows, length = input_ids.shape
        places = torch.ones(rows, length, dtype=torch.int64).cumsum(1) + 1
        kinds = self.kinds.expand(rows, -1).gather(1, torch.arange(length)[None].expand(rows, -1))
        before = input_ids.new_zeros(input_ids.shape)
        before[:, 1:] = input_ids[:, :-1].clone()
        before[:, 0] = 1
        return self.head(self.token(before) + self.place(places) + self.kind(kinds) + self.place.weight[places - 2])


def test_what_is_the_same_for_every_row_brings_none_together():
    def rows(step):
        ids = torch.randint(16, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids.flip(0)}

    program = check(Case(Placed, rows, ()), Plan(pp=1), 2)
    assert program.units.tokens and not program.units.unclear


APART = {
    "sorted and put back": by_expert,
    "mean": lambda z, y, keep: (z.sum(-1) - y).square().mean(),
    "sum": lambda z, y, keep: 0.5 * (z.sum(-1) - y).square().sum(),
    "sum over rows": lambda z, y, keep: (z.sum(-1) - y).square().sum() / len(z),
    "times rows": lambda z, y, keep: (z.sum(-1) - y).square().mean() * len(z),
    "dot": lambda z, y, keep: torch.dot(z.sum(-1), y) / z.shape[0],
    "gram": lambda z, y, keep: (z.T @ z).mean() / len(z),
    "masked": lambda z, y, keep: (z.square().sum(-1) * keep).sum() / keep.sum(),
    "masked, at least 1": lambda z, y, keep: (z.square().sum(-1) * keep).sum() / keep.sum().clamp(min=1),
    "halved": lambda z, y, keep: 0.5 * F.cross_entropy(z, keep.where(keep > 0, -100)),
    "log probabilities": lambda z, y, keep: F.nll_loss(z.log_softmax(-1), keep.where(keep > 0, -100)),
    "soft labels": lambda z, y, keep: F.cross_entropy(z, y[:, None].expand_as(z).softmax(-1)),
    "smoothed": lambda z, y, keep: F.cross_entropy(z, keep.where(keep > 0, -100), label_smoothing=0.1),
    "divergence": lambda z, y, keep: F.kl_div(
        z.log_softmax(-1), y[:, None].expand_as(z).softmax(-1), reduction="batchmean"
    ),
    "terms": lambda z, y, keep: torch.stack([z.mean(), z.square().mean()]).sum() + F.mse_loss(z.sum(-1), y) / 2,
    "numbered": one_row_only,
    "grouped": lambda z, y, keep: z.view(-1, 2, 4).transpose(0, 1).flatten(0, 1).tanh().mean(),
}


@pytest.mark.parametrize("name", APART)
def test_a_loss_that_adds_up_is_cut(name):
    """Micro-batches that count differently among them; two of them, or four of one row, or a replica of two."""
    for plan, size in ((Plan(), 2), (Plan(), 1), (Plan(dp=2), 1)):
        program = check(case(APART[name]), plan, size)
        assert not program.units.coupled and not program.units.unclear


def test_random_programs_that_are_cut_do_add_up():
    """Rows exchanged between two batches, and within one, leave the sum of their losses as it is."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, VOCAB, (2, 2 * BATCH, SEQ), generator=generator)
    apart = []
    for seed in (0, 1, 3, 5, 8, 18, 60, 64, 68, 69, 80, 93):
        torch.manual_seed(1234)
        model = RandomModel(seed).double()

        def again(times, model=model):
            return capture(model, {"input_ids": ids[: times * BATCH], "labels": labels[: times * BATCH]}, None)

        def loss(*rows, model=model):
            return model(ids[list(rows)], labels[list(rows)]).detach()

        verdict = judge(again(1), again)
        if not verdict.coupled and not verdict.unclear:
            apart.append(seed)
            exchanged = loss(0, 1, 2, 3) + loss(4, 5, 6, 7) - loss(0, 5, 3, 6) - loss(4, 1, 7, 2)
            assert abs(exchanged) < 1e-11, (seed, exchanged)  # float64, losses of about 3; rows that meet give 1e-4
    assert apart == [18, 60, 64, 68, 69, 80, 93]


def test_an_empty_value_is_unclear_and_no_error():
    nothing = case(lambda z, y, keep: (z.sum(1) + z[:, WIDTH:].flatten().view(len(z), 0).sum(1)).square().mean())
    assert "reshapes across" in compile_case(nothing, Plan(), 2).units.unclear


def test_what_has_no_rule_is_said_to_be_unclear():
    program = compile_case(case(lambda z, y, keep: torch.linalg.svdvals(z[:, None] * z[:, :, None]).mean()), Plan(), 2)
    assert "linalg" in program.units.unclear and "not known" in program.explain(2)
    assert not program.units.coupled
    (fault,) = unclear_faults(config(), program)
    assert fault.key == "train.check" and "linalg" in fault.problem and "train.check=true" in fault.fix
    assert not unclear_faults(config(train__check=True), program)
    assert not unclear_faults(config(train__micro_batch_size=8), program)


def test_weights_of_rows_that_are_no_count_are_an_error():
    loss = lambda z, y, keep: (z.square().sum(-1) * y.square()).sum() / y.square().sum()  # noqa: E731
    with pytest.raises(MegError, match="is no count"):
        compile_case(case(loss), Plan(), 2).count(batch(0))


def test_a_sum_over_rows_is_that_of_the_global_batch_at_every_cut():
    class Summed(models.TinyGPT):
        def forward(self, ids, labels):
            return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten(), reduction="sum")

    def first(**settings):
        chosen = config(**settings)
        work = lambda p, e, g: Trainer(chosen, p, e, g, models.FixedRows()).gradients(0)[:2]  # noqa: E731
        return on_ranks(chosen, work, Summed)[0]

    assert first(train__micro_batch_size=2, plan__dp=2) == pytest.approx(first(train__micro_batch_size=8), rel=1e-9)
