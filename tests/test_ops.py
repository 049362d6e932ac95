"""The operators that the compiler inserts, on ranks that are threads, against the same thing on one rank."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from threads import run_threads

from meg_compile.ops.collectives import copy_to_tp, part_of, reduce_from_tp
from meg_compile.ops.dropout import ShardRng, sharded_attention, sharded_dropout
from meg_compile.ops.group import Group
from meg_compile.ops.vocabulary import vocab_cross_entropy, vocab_embedding


def on_ranks(tp, function):
    """function(Group) on tp ranks -> the results in rank order."""
    return run_threads(tp, lambda rank: function(Group(tp, rank, dist.group.WORLD)))


def rows_of(table, tp, rank):
    """A rank's rows of a table, padded with nan: whoever reads padding is found out."""
    per_rank = -(-len(table) // tp)
    part = table[rank * per_rank : (rank + 1) * per_rank]
    return F.pad(part, (0, 0) * (table.dim() - 1) + (0, per_rank - len(part)), value=float("nan"))


@pytest.mark.parametrize("tp", [2, 4])
def test_f_is_the_identity_and_sums_gradients(tp):
    x, weights = torch.randn(2, 3), torch.randn(tp, 2, 3)

    def work(group):
        mine = x.clone().requires_grad_()
        out = copy_to_tp(mine, group)
        (out * weights[group.rank]).sum().backward()
        return out.detach(), mine.grad

    for out, grad in on_ranks(tp, work):
        assert torch.equal(out, x)
        torch.testing.assert_close(grad, weights.sum(0))


@pytest.mark.parametrize("tp", [2, 4])
def test_g_sums_and_is_the_identity_for_gradients(tp):
    parts, weight = torch.randn(tp, 2, 3), torch.randn(2, 3)

    def work(group):
        mine = parts[group.rank].clone().requires_grad_()
        out = reduce_from_tp(mine, group)
        (out * weight).sum().backward()
        return out.detach(), mine.grad, torch.equal(mine.detach(), parts[group.rank])

    for out, grad, kept in on_ranks(tp, work):
        torch.testing.assert_close(out, parts.sum(0))
        assert torch.equal(grad, weight) and kept, "a collective changed its argument"


def test_f_and_g_take_values_that_are_not_contiguous():
    x = torch.randn(3, 2)

    def work(group):
        mine = x.clone().requires_grad_()
        out = reduce_from_tp(copy_to_tp(mine.t(), group) * (group.rank + 1), group)
        out.sum().backward()
        return out.detach(), mine.grad

    for out, grad in on_ranks(2, work):
        torch.testing.assert_close(out, 3 * x.t())
        torch.testing.assert_close(grad, torch.full_like(x, 3.0))


def test_without_a_process_group_nothing_is_sent():
    x = torch.randn(3)
    with patch.object(dist, "all_reduce", side_effect=AssertionError):
        assert torch.equal(reduce_from_tp(x, Group(4)), x) and torch.equal(copy_to_tp(x, Group()), x)


def test_part_of_cuts_every_sharded_axis_of_a_dim():
    x = torch.arange(24).view(2, 12)
    dims = [[(2, False)], [(3, False), (4, True)]]
    parts = on_ranks(2, lambda group: part_of(x, group, dims))
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.view(2, 3, 4)[:, :, 2 * rank : 2 * rank + 2].reshape(2, 6))


# Embedding


@pytest.mark.parametrize("tp", [2, 4, 5])
@pytest.mark.parametrize("vocab", [7, 8, 11, 20, 32])
@pytest.mark.parametrize("padding_idx", [-1, 0, 6])
def test_embedding_on_a_sharded_vocabulary(vocab, tp, padding_idx):
    table = torch.randn(vocab, 3, dtype=torch.float64)
    index = torch.randint(0, vocab, (4, 6))
    index[0, :3] = torch.tensor([0, 6, vocab - 1])
    weight = torch.randn(4, 6, 3, dtype=torch.float64)

    whole = table.clone().requires_grad_()
    right = F.embedding(index, whole, padding_idx if padding_idx >= 0 else None)
    (right * weight).sum().backward()

    def work(group):
        mine = rows_of(table, tp, group.rank).requires_grad_()
        out = reduce_from_tp(vocab_embedding(mine, index, group, padding_idx), group)
        (out * weight).sum().backward()
        return out.detach(), mine.grad

    results = on_ranks(tp, work)
    for out, _ in results:
        torch.testing.assert_close(out, right.detach(), rtol=1e-12, atol=1e-12)
    joined = torch.cat([grad for _, grad in results])
    torch.testing.assert_close(joined[:vocab], whole.grad, rtol=1e-12, atol=1e-12)
    assert not joined[vocab:].any(), "padding has a gradient"


# Cross entropy

IGNORE = {"some": [0, 3, 4], "none": [], "all": list(range(9))}


def cross_entropy_on(tp, logits, target, reduction, ignore_index=-100, grad=1.0):
    """[(loss, gradient of this rank's logits)] of a cross entropy over tp ranks."""
    per_rank = -(-logits.shape[1] // tp)

    def work(group):
        part = logits[:, group.rank * per_rank : (group.rank + 1) * per_rank]
        mine = F.pad(part, (0, per_rank - part.shape[1]), value=float("nan")).requires_grad_()
        out = vocab_cross_entropy(mine, target, group, logits.shape[1], reduction, ignore_index)
        (out * grad).sum().backward()
        return out.detach(), mine.grad

    return on_ranks(tp, work)


def assert_cross_entropy(tp, logits, target, reduction, ignore_index=-100, tolerance=1e-12):
    names = {0: "none", 1: "mean", 2: "sum"}
    whole = logits.clone().requires_grad_()
    right = F.cross_entropy(whole, target, reduction=names[reduction], ignore_index=ignore_index)
    weight = torch.linspace(0.5, 2.0, len(target), dtype=right.dtype) if reduction == 0 else 1.0
    (right * weight).sum().backward()
    results = cross_entropy_on(tp, logits, target, reduction, ignore_index, weight)
    for out, grad in results:
        torch.testing.assert_close(out.to(right.dtype), right.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert grad.dtype == logits.dtype
        torch.testing.assert_close(out, results[0][0], rtol=0, atol=0, equal_nan=True, msg="ranks see different losses")
    joined = torch.cat([grad for _, grad in results], 1)
    real, padding = joined[:, : logits.shape[1]], joined[:, logits.shape[1] :]
    torch.testing.assert_close(real, whole.grad, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not padding.nan_to_num(0.0).any() or torch.isnan(whole.grad).any(), "padding has a gradient"


@pytest.mark.parametrize("tp", [2, 4, 5])
@pytest.mark.parametrize("vocab", range(7, 33, 5))
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", ["some", "none"])
def test_cross_entropy_on_a_sharded_vocabulary(tp, vocab, reduction, ignored):
    logits = torch.randn(9, vocab, dtype=torch.float64) * 3
    target = torch.randint(0, vocab, (9,))
    target[:3] = torch.tensor([vocab - 1, 0, vocab // 2])
    target[IGNORE[ignored]] = -100
    assert_cross_entropy(tp, logits, target, reduction)


@pytest.mark.parametrize("reduction", [0, 2])
def test_all_targets_ignored_cost_nothing(reduction):
    assert_cross_entropy(2, torch.randn(9, 8, dtype=torch.float64), torch.full((9,), -100), reduction)


def test_the_mean_of_no_targets_is_nan_as_it_is_in_torch():
    assert_cross_entropy(2, torch.randn(9, 8, dtype=torch.float64), torch.full((9,), -100), 1)


@pytest.mark.parametrize("tp", [2, 4])
def test_more_ranks_than_a_vocabulary_needs(tp):
    """Vocabulary 5 on 4 ranks leaves the last rank with padding alone."""
    assert_cross_entropy(tp, torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 5, 1)


def test_an_ignore_index_that_is_a_class():
    logits, target = torch.randn(9, 8, dtype=torch.float64), torch.arange(9) % 8
    assert_cross_entropy(2, logits, target, 1, ignore_index=3)


def test_large_logits_do_not_overflow():
    logits = torch.randn(9, 8, dtype=torch.float64) * 1e3 + 1e4
    assert_cross_entropy(4, logits, torch.arange(9) % 8, 1)


@pytest.mark.parametrize("where", ["one class", "a whole shard", "the first shard"])
def test_logits_of_minus_infinity(where):
    """Masked classes: some of a rank's, or all of them."""
    logits = torch.randn(4, 8, dtype=torch.float64)
    columns = {"one class": [5], "a whole shard": [4, 5], "the first shard": [0, 1]}[where]
    logits[:, columns] = float("-inf")
    assert_cross_entropy(4, logits, torch.tensor([2, 3, 6, 7]), 1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("reduction", [1, 2])
def test_cross_entropy_in_narrow_types_is_computed_in_float32(dtype, tolerance, reduction):
    """Half-wide logits: the loss must be as good as float32 of the same logits."""
    logits = (torch.randn(9, 20) * 4).to(dtype)
    target = torch.randint(0, 20, (9,))
    right = F.cross_entropy(logits.float(), target, reduction={1: "mean", 2: "sum"}[reduction])
    for out, grad in cross_entropy_on(4, logits, target, reduction):
        torch.testing.assert_close(out.float(), right, rtol=1e-5, atol=1e-5)
        assert grad.dtype == dtype and torch.isfinite(grad).all()
    whole = logits.detach().clone().float().requires_grad_()
    F.cross_entropy(whole, target, reduction={1: "mean", 2: "sum"}[reduction]).backward()
    joined = torch.cat([grad for _, grad in cross_entropy_on(4, logits, target, reduction)], 1).float()
    torch.testing.assert_close(joined, whole.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_takes_two_all_reduces_forward_and_none_backward(reduction):
    counts = []
    real = dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, group=None):
        counts.append(tensor.numel())
        return real(tensor, op, group)

    def work(group):
        mine = torch.randn(6, 4, requires_grad=True)
        out = vocab_cross_entropy(mine, torch.arange(6), group, 8, reduction)
        forward = len(counts)
        dist.barrier()
        out.sum().backward()
        return forward

    with patch.object(dist, "all_reduce", counted):
        on_ranks(2, work)
    assert sorted(counts) == [6, 6, 12, 12], "the largest logit [N], then both sums [2, N], on each of two ranks"


# Dropout


def test_sharded_dropout_draws_its_own_mask_and_leaves_the_common_stream_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (ShardRng(seed, torch.device("cpu")) for seed in (1, 2))
    x = torch.ones(1000)
    a, b = sharded_dropout(x, 0.5, True, first), sharded_dropout(x, 0.5, True, second)
    assert not torch.equal(a, b) and 300 < (a == 0).sum() < 700
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(sharded_dropout(x, 0.5, True, ShardRng(1, torch.device("cpu"))), a)
    assert not torch.equal(sharded_dropout(x, 0.5, True, first), a), "the stream stands still"


def test_sharded_attention_without_dropout_is_attention():
    q, k, v = torch.randn(3, 2, 4, 5, 6)
    rng = ShardRng(1, torch.device("cpu"))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(sharded_attention(rng, q, k, v, None, 0.0, True), right)
    assert torch.equal(sharded_attention(None, q, k, v, None, 0.0, True), right)
