"""Rows of several datasets in one order that keeps to their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from meg_compile.errors import Fault, Refused


def blend(weights: Sequence[float], num: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Of `num` rows, in order: the dataset that each comes from (int16), and how many came from it before (int64).

    Row j of a dataset with share w is due at (j + 1/2) / w, and the rows come as they are due. So of any first n rows
    w n are its own, to within (1 + k w) / 2 for k datasets.
    """
    shares = numpy.asarray(weights, numpy.float64) / sum(weights)
    due = [(numpy.arange(int(share * num + len(shares)) + 1) + 0.5) / share for share in shares]
    sets = numpy.repeat(numpy.arange(len(due), dtype=numpy.int16), [len(times) for times in due])
    before = numpy.concatenate([numpy.arange(len(times)) for times in due])
    order = numpy.argsort(numpy.concatenate(due), kind="stable")[:num]
    return sets[order], before[order]


def read_paths(path: Any) -> list[tuple[str, float | None]]:
    """(path, weight) of each dataset, of `a`, `[a, b]`, `[0.3, a, 0.7, b]` or `[{path: a, weight: 0.3}, ...]`.

    Without weights, None. Refused for what is none of these.
    """
    items = path if isinstance(path, list) else [path]
    if items and all(isinstance(item, str) and not _is_number(item) for item in items):
        return [(item, None) for item in items]
    if items and all(isinstance(item, Mapping) and item.keys() == {"path", "weight"} for item in items):
        items = [value for item in items for value in (item["weight"], item["path"])]
    pairs = list(zip(items[1::2], items[::2], strict=False))
    if not pairs or len(items) % 2 or not all(isinstance(one, str) and _is_number(weight) for one, weight in pairs):
        problem = "is neither a path nor a list of weights and paths"
        raise Refused(Fault("data.path", path, problem, "write it as data.path=[0.3,a,0.7,b]"))
    if wrong := [one for one, weight in pairs if not 0 < float(weight) < numpy.inf]:
        problem = f"the weight of {wrong[0]} is not over 0"
        raise Refused(Fault("data.path", path, problem, "give it one, or leave it out"))
    return [(one, float(weight)) for one, weight in pairs]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)
