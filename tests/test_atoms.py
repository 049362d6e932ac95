"""Axes as products of atoms: what unifying, refining and cutting keep true."""

import random

import pytest

from meg_compile.axes.atoms import (
    Dims,
    atoms,
    branches,
    concatenate,
    cut,
    fresh,
    leaves,
    mark_produced,
    mark_whole,
    name,
    show,
    size_of,
    unify,
)


def sizes(dim):
    return [atom.size for atom in leaves(dim)]


def shape(*numbers):
    return Dims(fresh(n) for n in numbers)


def flat(dims):
    return [atom for dim in dims for atom in dim]


def test_a_view_refines_an_axis_wherever_it_occurs():
    embed = fresh(12)
    unify(embed, flat(shape(3, 4)))
    elsewhere = Dims([fresh(5), embed])
    assert sizes(embed) == [3, 4] and sizes(elsewhere[1]) == [3, 4]


def test_views_of_views_agree():
    x, y, z = shape(4, 6), shape(2, 12), shape(8, 3)
    unify(flat(x), flat(y))
    unify(flat(y), flat(z))
    assert sizes(flat(x)) == sizes(flat(y)) == sizes(flat(z)) == [2, 2, 2, 3]


def test_sizes_that_do_not_factor_alike_are_whole_for_good():
    x, y = shape(4, 9), shape(6, 6)
    unify(flat(x), flat(y))
    assert all(atom.whole and atom.torn for atom in atoms(flat(x)))
    assert [size_of(d) for d in x] == [4, 9] and [size_of(d) for d in y] == [6, 6]


def test_an_axis_of_size_one_is_no_axis():
    assert fresh(1) == () and size_of(()) == 1 and show(()) == "1"
    x, y = shape(1, 6, 1), shape(6)
    unify(flat(x), flat(y))
    assert leaves(x[1]) == leaves(y[0])


def test_facts_survive_refining_and_merging():
    """What was said of an axis is true of its factors, and of what it is unified with, before or after."""
    first, second, third = fresh(12), fresh(12), fresh(12)
    mark_whole(first, "softmax runs along it")
    mark_produced(third)
    unify(first, flat(shape(3, 4)))
    unify(first, second)
    unify(third, second)
    assert [atom.whole for atom in atoms(third)] == ["softmax runs along it"] * 2
    assert all(atom.produced for atom in atoms(first))


def test_the_first_reason_stays():
    axis = fresh(4)
    mark_whole(axis, "first")
    mark_whole(axis, "second")
    assert next(atoms(axis)).whole == "first"


def test_cutting_makes_segments_once():
    qkv = fresh(12)
    first, second = cut(qkv, [4, 4, 4]), cut(qkv, [4, 8])
    assert [size_of(p) for p in first] == [4, 4, 4] and [size_of(p) for p in second] == [4, 8]
    assert leaves(second[0]) == leaves(first[0])
    assert [leaves(b) for b in branches(second[1])] == [leaves(first[1]), leaves(first[2])]


def test_cutting_finds_the_major_factor():
    """[3, H, D] flattened and cut into thirds: each third is H x D, and no new axis."""
    stacked = shape(3, 4, 2)
    row = fresh(24)
    unify(row, flat(stacked))
    pieces = cut(row, [8, 8, 8])
    assert [size_of(p) for p in pieces] == [8, 8, 8]
    for piece in pieces:
        assert leaves(piece)[-2:] == leaves(flat(stacked))[-2:]


def test_a_cut_through_a_factor_is_refused():
    row = fresh(24)
    unify(row, flat(shape(4, 6)))
    assert cut(row, [9, 15]) is None
    assert sizes(row) == [4, 6]


def test_refining_a_concatenation_refines_its_segments():
    """q | k | v as rows, then viewed as 3 * H heads of D: each segment is H x D with the same D."""
    qkv = fresh(24)
    pieces = cut(qkv, [8, 8, 8])
    unify(qkv, flat(shape(12, 2)))
    ends = {leaves(piece)[-1] for piece in pieces}
    assert [sizes(piece) for piece in pieces] == [[4, 2]] * 3 and len(ends) == 1


def test_concatenations_that_do_not_line_up_are_torn():
    left, right = concatenate([fresh(2), fresh(6)]), concatenate([fresh(4), fresh(4)])
    unify(left, right)
    assert all(atom.torn and atom.whole for atom in (*atoms(left), *atoms(right)))


def test_branches_of_a_concatenation_under_a_factor():
    gate, up, minor = fresh(4), fresh(4), fresh(3)
    dim = (*concatenate([gate, up]), *minor)
    assert branches(dim) == [[*gate, *minor], [*up, *minor]]


def test_names_are_for_single_axes():
    axis, pair = fresh(6), fresh(2) + fresh(3)
    name(axis, "heads")
    name(pair, "heads")
    assert show(axis) == "heads:6" and show(pair) == "axis:2 x axis:3"


@pytest.mark.parametrize("seed", range(40))
def test_random_facts_keep_sizes_and_never_lose_a_whole(seed):
    draw = random.Random(seed)
    numbers = [12, 24, 8, 16, 6, 36]
    dims = [fresh(draw.choice(numbers)) for _ in range(6)]
    wholes, before = [], [size_of(dim) for dim in dims]
    for _ in range(30):
        dim = draw.choice(dims)
        size = size_of(dim)
        act = draw.choice(["view", "cut", "unify", "whole"])
        if act == "view":
            factor = draw.choice([f for f in range(1, size + 1) if size % f == 0])
            unify(dim, flat(shape(factor, size // factor)))
        elif act == "cut" and size > 1:
            at = draw.randrange(1, size)
            pieces = cut(dim, [at, size - at])
            assert pieces is None or [size_of(p) for p in pieces] == [at, size - at]
        elif act == "unify":
            other = draw.choice([d for d in dims if size_of(d) == size])
            unify(dim, other)
            same = leaves(dim) == leaves(other)
            assert same or any(atom.torn for atom in (*atoms(dim), *atoms(other)))
        elif act == "whole" and draw.random() < 0.2:
            mark_whole(dim, "said")
            wholes.append(dim)
        assert [size_of(d) for d in dims] == before
        for d in dims:
            assert all(size_of(b) >= 1 for b in branches(d))
            parts = [sum(size_of(s) for s in atom.segments) for atom in leaves(d) if atom.segments is not None]
            assert parts == [atom.size for atom in leaves(d) if atom.segments is not None]
        assert all(atom.whole for w in wholes for atom in atoms(w))
