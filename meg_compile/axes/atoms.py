"""Logical axes as products of atoms.

A *dim* is a tuple of atoms, major to minor; its size is the product of theirs and a dim of size 1 is ``()``.
An *atom* is a leaf, or a product of finer atoms (``factors``), or a concatenation of dims (``segments``).
Atoms live in a union-find. They are only ever merged, refined or marked ``whole``, so a fact that a rule has
stated stays true however the axes are refined afterwards.

    view(x[.., 768], [.., 12, 64])     refines the atom of 768 into 12 x 64, wherever that axis occurs
    split(x[.., 2304], 768)            gives the atom of 2304 three segments of 768
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

Dim = tuple["Atom", ...]


class Atom:
    """One logical axis, or a part of one.

    size:     number of entries.
    whole:    why some operator needs all of it on every rank; None while it may be sharded.
    torn:     not even its entries mean the same thing everywhere (sizes that do not factor alike).
    produced: some weight makes it (it is the output of a linear map), so cutting it is worth while.
    repeated: some operator repeats a value along it, as keys and values for the queries of a group.
    names:    what operators call it ("heads", "vocab"), for people.
    """

    __slots__ = ("factors", "merged", "names", "produced", "repeated", "segments", "size", "torn", "whole")

    def __init__(self, size: int, like: Atom | None = None, segments: list[Dim] | None = None):
        self.size = size
        self.segments = segments
        self.factors: tuple[Atom, ...] | None = None
        self.merged: Atom | None = None
        self.whole: str | None = like.whole if like else None
        self.torn: bool = like.torn if like else False
        self.produced: bool = like.produced if like else False
        self.repeated: bool = like.repeated if like else False
        self.names: set[str] = set()

    def __repr__(self) -> str:
        if find(self) is not self or self.factors is not None:
            return show((self,))
        if self.segments is not None:
            return "(" + " + ".join(map(show, self.segments)) + ")"
        return f"{'/'.join(sorted(self.names)) or 'axis'}:{self.size}{'!' if self.whole else ''}"


class Dims(tuple[Dim, ...]):
    """The dims of one tensor, in order."""

    __slots__ = ()

    def put(self, i: int, *dims: Dim) -> Dims:
        """These dims with dim i replaced by any number of others."""
        i %= len(self)
        return Dims(self[:i] + dims + self[i + 1 :])


def fresh(size: int, like: Atom | None = None) -> Dim:
    """A new dim of this size that nothing is known about."""
    return () if size == 1 else (Atom(size, like),)


def size_of(dim: Iterable[Atom]) -> int:
    return prod(atom.size for atom in dim)


def show(dim: Dim) -> str:
    return " x ".join(map(repr, leaves(dim))) or "1"


def find(atom: Atom) -> Atom:
    """The representative of the atom's class."""
    root = atom
    while root.merged is not None:
        root = root.merged
    while atom.merged is not None:
        atom.merged, atom = root, atom.merged
    return root


def leaves(dim: Iterable[Atom]) -> Dim:
    """The unrefined atoms of a dim, major to minor; a concatenation counts as one."""
    out: list[Atom] = []
    for atom in dim:
        atom = find(atom)
        if atom.factors is None:
            out.append(atom)
        else:
            out.extend(leaves(atom.factors))
    return tuple(out)


def atoms(dim: Iterable[Atom]) -> Iterator[Atom]:
    """The leaf atoms of a dim, those inside its concatenations too."""
    for atom in leaves(dim):
        if atom.segments is None:
            yield atom
        else:
            for segment in atom.segments:
                yield from atoms(segment)


def branches(dim: Dim) -> list[list[Atom]]:
    """The products of leaf atoms that a dim is a concatenation of."""
    out: list[list[Atom]] = [[]]
    for atom in leaves(dim):
        parts = [[atom]] if atom.segments is None else [b for s in atom.segments for b in branches(s)]
        out = [head + part for head in out for part in parts]
    return out


def mark_whole(dim: Iterable[Atom], why: str, torn: bool = False) -> None:
    """Record that some operator needs all of this dim; the first reason stays."""
    for atom in atoms(dim):
        atom.whole = atom.whole or why
        atom.torn = atom.torn or torn


def mark_produced(dim: Dim) -> None:
    for atom in atoms(dim):
        atom.produced = True


def repeats(size: int) -> Dim:
    """A new dim along which a value is repeated."""
    dim = fresh(size)
    for atom in dim:
        atom.repeated = True
    return dim


def name(dim: Dim, word: str) -> None:
    """Call a dim by a word that people use, where it is one leaf axis."""
    found = leaves(dim)
    if len(found) == 1 and found[0].segments is None:
        found[0].names.add(word)


def concatenate(dims: list[Dim]) -> Dim:
    return dims[0] if len(dims) == 1 else (Atom(sum(map(size_of, dims)), segments=list(dims)),)


def unify(left: Iterable[Atom], right: Iterable[Atom]) -> None:
    """Make two dims, or two whole shapes laid end to end, the same axes, refining both as needed.

    Works from the minor end. Where the sizes do not factor alike, what is left is torn: whole for good.
    """
    lefts, rights = list(left), list(right)
    while (a := _pop(lefts)) is not None and (b := _pop(rights)) is not None:
        if a is b:
            continue
        if a.size == b.size:
            _merge(a, b)
            continue
        if a.size < b.size:
            a, b, lefts, rights = b, a, rights, lefts
        if not _divide(a, b.size):
            mark_whole((a, b, *lefts, *rights), f"sizes {a.size} and {b.size} do not factor alike", torn=True)
            return
        lefts.append(a)
        rights.append(b)


def cut(dim: Dim, sizes: list[int]) -> list[Dim] | None:
    """Consecutive segments of a dim, of these sizes; None where its factors forbid it."""
    if len(sizes) == 1:
        return [dim]
    major, minor = leaves(dim), ()
    while len(major) > 1 and not any(s % major[-1].size for s in sizes):
        minor = major[-1:] + minor
        sizes = [s // major[-1].size for s in sizes]
        major = major[:-1]
    if len(major) != 1:
        return None
    atom = major[0]
    if atom.segments is None:
        atom.segments = [fresh(s, atom) for s in sizes]
    rest, out = list(_flat(atom)), []
    for wanted in sizes:
        got: list[Dim] = []
        while wanted:
            segment = rest.pop(0)
            if size_of(segment) > wanted:
                two = cut(segment, [wanted, size_of(segment) - wanted])
                if two is None:
                    return None
                segment = two[0]
                rest.insert(0, two[1])
            got.append(segment)
            wanted -= size_of(segment)
        out.append(concatenate(got) + minor)
    return out


def _pop(stack: list[Atom]) -> Atom | None:
    while stack:
        atom = find(stack.pop())
        if atom.factors is None:
            return atom
        stack.extend(atom.factors)
    return None


def _flat(atom: Atom) -> Iterator[Dim]:
    """The segments of a concatenation, nested ones opened."""
    for segment in map(leaves, atom.segments or ()):
        if len(segment) == 1 and segment[0].segments is not None:
            yield from _flat(segment[0])
        else:
            yield segment


def _merge(a: Atom, b: Atom) -> None:
    if b.segments is not None and a.segments is None:
        a, b = b, a
    if b.segments is not None:
        ours, theirs = list(_flat(a)), list(_flat(b))
        if list(map(size_of, ours)) != list(map(size_of, theirs)):
            mark_whole((a, b), "pieces of one axis do not line up", torn=True)
            return
        for x, y in zip(ours, theirs, strict=True):
            unify(x, y)
        if find(a) is find(b):
            return
        if a.factors or b.factors:
            unify((a,), (b,))
            return
    for atom in atoms((a,)):
        atom.whole = atom.whole or b.whole
        atom.torn = atom.torn or b.torn
        atom.produced = atom.produced or b.produced
        atom.repeated = atom.repeated or b.repeated
        atom.names |= b.names if atom is a else set()
    b.merged = a


def _divide(atom: Atom, minor_size: int) -> bool:
    """Refine an atom into (size / minor_size) x minor_size, through its segments too."""
    if atom.size % minor_size:
        return False
    minor = Atom(minor_size, like=atom)
    if atom.segments is None:
        atom.factors = (Atom(atom.size // minor_size, like=atom), minor)
        return True
    segments = list(_flat(atom))
    if any(size_of(s) % minor_size for s in segments):
        return False
    majors = [fresh(size_of(s) // minor_size) for s in segments]
    for segment, major in zip(segments, majors, strict=True):
        unify(segment, (*major, minor))
    atom.factors = (Atom(atom.size // minor_size, segments=majors), minor)
    atom.segments = None
    return True
