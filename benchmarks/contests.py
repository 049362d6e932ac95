"""Who runs against whom, and the ratios that are to be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.contenders import (
    Step,
    after_forward,
    compiled,
    eager,
    pipeline_by_hand,
    tensor_by_dtensor,
    tensor_by_hand,
)
from benchmarks.model import Size
from meg_compile import Plan

PIPELINE_ROWS, PIPELINE_MICRO_BATCHES = 1, 8


@dataclass(frozen=True)
class Pair:
    """`ours` / `theirs` in step time; `bar` is the most that it may be."""

    key: str
    title: str
    ours: str
    theirs: str
    bar: float


@dataclass(frozen=True)
class Contest:
    """Contenders that take their steps in turn in the same `nproc` processes, on batches of `rows`."""

    nproc: int
    rows: int
    build: Callable[[Size], dict[str, Step]]
    pairs: tuple[Pair, ...]


def _one(size: Size) -> dict[str, Step]:
    return {"compiled": compiled(size, Plan(), rows=4)[0], "eager": eager(size)}


def _recompute(size: Size) -> dict[str, Step]:
    return {
        "recompute": compiled(size, Plan(recompute="full"), rows=4)[0],
        "forward again": after_forward(size, compiled(size, Plan(), rows=4)[0]),
    }


def _tensor(size: Size) -> dict[str, Step]:
    return {
        "compiled": compiled(size, Plan(tp=2), rows=4)[0],
        "by hand": tensor_by_hand(size),
        "DTensor": tensor_by_dtensor(size),
    }


def _sequence(size: Size) -> dict[str, Step]:
    return {
        "sequence": compiled(size, Plan(tp=2, sp=True), rows=4)[0],
        "compiled": compiled(size, Plan(tp=2), rows=4)[0],
        "DTensor": tensor_by_dtensor(size, sp=True),
    }


def _pipeline(size: Size) -> dict[str, Step]:
    half = size.layers // 2
    equal = Plan(pp=2, stages=(half, size.layers - half))
    return _against_hand(size, Plan(pp=2)) | {"equal cut": compiled(size, equal, PIPELINE_ROWS)[0]}


def _interleaved(size: Size) -> dict[str, Step]:
    return _against_hand(size, Plan(pp=2, vpp=2, schedule="interleaved_1f1b"))


def _against_hand(size: Size, plan: Plan) -> dict[str, Step]:
    """A compiled pipeline, and one by hand with as many blocks in each stage."""
    step, program = compiled(size, plan, PIPELINE_ROWS)
    cut = [len(stage.layers) for stage in program.stages]
    return {"compiled": step, "by hand": pipeline_by_hand(size, PIPELINE_ROWS, PIPELINE_MICRO_BATCHES, cut)}


CONTESTS = (
    Contest(1, 4, _one, (Pair("eager", "tp=1 / plain module, eager", "compiled", "eager", 1.02),)),
    Contest(
        1,
        4,
        _recompute,
        (Pair("recompute", "recompute=full / none, and a forward more", "recompute", "forward again", 1.00),),
    ),
    Contest(
        2,
        4,
        _tensor,
        (
            Pair("tp-hand", "tp=2 / f and g by hand", "compiled", "by hand", 1.03),
            Pair("tp-dtensor", "tp=2 / DTensor, loss parallel", "compiled", "DTensor", 0.85),
        ),
    ),
    Contest(
        2,
        4,
        _sequence,
        (
            Pair("sp", "tp=2 sp / tp=2", "sequence", "compiled", 1.10),
            Pair("sp-dtensor", "tp=2 sp / DTensor, sequence parallel", "sequence", "DTensor", 0.80),
        ),
    ),
    Contest(
        2,
        PIPELINE_ROWS * PIPELINE_MICRO_BATCHES,
        _pipeline,
        (
            Pair("pp-hand", "pp=2 1F1B / stages by hand, same cut", "compiled", "by hand", 1.03),
            Pair("pp-cut", "pp=2 automatic cut / equal layers", "compiled", "equal cut", 0.97),
        ),
    ),
    Contest(
        2,
        PIPELINE_ROWS * PIPELINE_MICRO_BATCHES,
        _interleaved,
        (Pair("vpp-hand", "pp=2 vpp=2 1F1B / stages by hand, same cut", "compiled", "by hand", 1.03),),
    ),
)
KEYS = tuple(pair.key for contest in CONTESTS for pair in contest.pairs)
