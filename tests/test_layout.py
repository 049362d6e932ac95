"""Which entries of a tensor belong to which rank."""

import random
from math import prod

import pytest
import torch

from meg_compile.axes.atoms import Dims, atoms, branches, concatenate, cut, fresh, size_of, unify
from meg_compile.axes.layout import Layout, shard


def layout(tp, *sharded):
    return Layout(tp, frozenset(atom for dim in sharded for atom in atoms(dim)))


def shards_of(dims, layout):
    return [shard(layout, dims, rank) for rank in range(layout.tp)]


def test_an_axis_is_cut_into_consecutive_blocks():
    rows, columns = fresh(8), fresh(3)
    whole = torch.arange(24).view(8, 3)
    for rank, part in enumerate(shards_of(Dims([rows, columns]), layout(4, rows))):
        assert torch.equal(part.slice(whole), whole[2 * rank : 2 * rank + 2])


def test_a_minor_factor_is_cut_inside_every_major_one():
    """[H, 3, D] with the last cut: each rank has its part of every head's q, k and v."""
    heads, three, size = fresh(2), fresh(3), fresh(4)
    row = fresh(24)
    unify(row, heads + three + size)
    whole = torch.arange(24)
    for rank, part in enumerate(shards_of(Dims([row]), layout(2, size))):
        assert torch.equal(part.slice(whole), whole.view(6, 4)[:, 2 * rank : 2 * rank + 2].flatten())


def test_each_segment_is_cut_by_itself():
    q, k, v = fresh(8), fresh(4), fresh(4)
    whole = torch.arange(16)
    parts = shards_of(Dims([concatenate([q, k, v])]), layout(2, q, k, v))
    assert parts[0].runs == ((0, ((0, 4), (8, 2), (12, 2))),)
    assert torch.equal(parts[1].slice(whole), torch.cat([whole[4:8], whole[10:12], whole[14:16]]))


def test_runs_are_as_few_as_can_be():
    outer, inner = fresh(8), fresh(4)
    row = outer + inner
    assert layout(2, outer).runs(row, 1) == [(16, 16)]
    assert layout(2, inner).runs(row, 0) == [(4 * i, 2) for i in range(8)]


@pytest.mark.parametrize(("size", "tp"), [(5, 2), (5, 4), (101, 4), (3, 4), (7, 3)])
def test_padding_lies_behind_the_last_real_entries_and_is_zero(size, tp):
    axis = fresh(size)
    whole = torch.arange(1, size + 1)
    parts = [part.slice(whole) for part in shards_of(Dims([axis]), layout(tp, axis))]
    per_rank = -(-size // tp)
    assert [len(p) for p in parts] == [per_rank] * tp
    joined = torch.cat(parts)
    assert torch.equal(joined[:size], whole) and not joined[size:].any()


def test_a_tensor_without_a_sharded_axis_is_copied():
    axis = fresh(4)
    whole = torch.arange(4.0)
    part = shard(layout(2, fresh(6)), Dims([axis]), 1)
    own = part.slice(whole)
    assert part.runs == () and torch.equal(own, whole) and own.data_ptr() != whole.data_ptr()


def random_dim(draw, size):
    """A dim of this size with random factors and segments inside."""
    dim = fresh(size)
    for _ in range(draw.randrange(3)):
        factor = draw.choice([f for f in range(1, size + 1) if size % f == 0])
        if draw.random() < 0.6:
            unify(dim, fresh(factor) + fresh(size // factor))
        elif size > 2:
            cut(dim, [at := draw.randrange(1, size), size - at])
    return dim


@pytest.mark.parametrize("seed", range(60))
def test_random_shards_partition_the_whole_and_go_back_to_it(seed):
    draw = random.Random(seed)
    tp = draw.choice([2, 3, 4])
    dims = Dims(random_dim(draw, draw.choice([1, 4, 6, 12, 24])) for _ in range(draw.randrange(1, 4)))
    chosen = [a for dim in dims for a in atoms(dim) if a.size % tp == 0 and a.size > 1]
    draw.shuffle(chosen)
    kept = []
    for atom in chosen:  # atoms that meet in one tensor are never sharded together
        rows = [[]]
        for dim in dims:
            rows = [row + branch for row in rows for branch in branches(dim)]
        if all(sum(a in (*kept, atom) for a in row) <= 1 for row in rows):
            kept.append(atom)
    where = Layout(tp, frozenset(kept))
    whole = torch.arange(1, prod(map(size_of, dims)) + 1).view([size_of(d) for d in dims])
    parts = shards_of(dims, where)

    held = torch.cat([part.slice(whole).flatten() for part in parts])
    counted = held[held > 0].bincount(minlength=whole.numel() + 1)[1:].view(whole.shape)
    even = all(where.even(dim) for dim in dims) and bool(kept)
    assert counted.min() >= 1 and counted.max() <= tp
    if even and len([d for d in dims if where.holds(d)]) == 1:
        assert counted.max() == 1, "an entry lies on two ranks"

    back = torch.zeros_like(whole)
    for part in parts:
        assert part.local_shape == tuple(where.local(d) for d in dims)
        part.place(part.slice(whole), back)
    assert torch.equal(back, whole)


@pytest.mark.parametrize("seed", range(20))
def test_a_view_of_a_shard_is_the_shard_of_the_view(seed):
    """What rewriting literals rests on: slicing first and viewing with local sizes gives the same entries."""
    draw = random.Random(seed)
    shapes = draw.choice([((4, 24), (4, 6, 4)), ((4, 24), (4, 2, 3, 4)), ((24, 4), (3, 8, 4)), ((4, 6, 4), (4, 24))])
    x, y = (Dims(fresh(n) for n in shape) for shape in shapes)
    unify([a for d in x for a in d], [a for d in y for a in d])
    atom = draw.choice([a for d in y for a in atoms(d) if a.size % 2 == 0])
    where = Layout(2, frozenset([atom]))
    whole = torch.arange(96).view(shapes[0])
    for rank in range(2):
        first = shard(where, x, rank).slice(whole).view([where.local(d) for d in y])
        assert torch.equal(first, shard(where, y, rank).slice(whole.view(shapes[1])))
