"""Numbers, memory and speed of the compiled program on one GPU: `sh benchmarks/gpu_check.sh`.

Exit code 1 where the program's numbers differ from the plain model's, or its memory from the prediction; speed is only
measured. What does not fit into `--minutes` is not measured, and the table says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import device as devices
from benchmarks.gpu.case import Case
from benchmarks.gpu.equality import equality
from benchmarks.gpu.memory import memory
from benchmarks.gpu.speed import CONTENDERS, TITLES, speed
from meg_compile.explain.table import human_bytes, table

EQUAL = Case("small", layers=2, hidden=256, heads=4, seq=256, vocab=8192, rows=4, dropout=0.1)
HELD = Case("1.2B width", layers=12, hidden=1536, heads=16, seq=1024, vocab=8192, rows=8)
FAST = [
    Case("1.5B", layers=48, hidden=1600, heads=25, seq=1024, vocab=50304, rows=8),
    Case("1.2B", layers=40, hidden=1536, heads=16, seq=1024, vocab=50304, rows=8),
]
DRY = Case("tiny", layers=1, hidden=64, heads=4, seq=64, vocab=128, rows=4)
CHECKS = ("equality", "memory", "speed")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, torch.compile without a compiler")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS, help="the checks to run (all)")
    parser.add_argument("--whole", action="store_true", help="compile the plain model as a whole (takes minutes)")
    parser.add_argument("--minutes", type=float, default=5.5, help="start no measurement after so long (5.5)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="where figures go")
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs on the CPU")
    device = torch.device("cpu") if args.dry else torch.device("cuda", 0)
    deadline = time.perf_counter() + 60 * args.minutes
    found: dict[str, Any] = {"device": devices.name(device), "torch": torch.__version__}
    print(f"{found['device']}, torch {found['torch']}\n", flush=True)
    with devices.one_rank(device) as groups, _without_compiler() if args.dry else nullcontext():
        for check in args.only:
            found[check] = list(_measured(check, args.dry, args.whole, groups, device, deadline))
            print(_shown(check, found[check]) + "\n", flush=True)
            args.json.write_text(json.dumps(found, indent=2) + "\n")
    held = all(row["ok"] for check in ("equality", "memory") for row in found.get(check, []))
    print("numbers and memory are as they should be" if held else "NUMBERS OR MEMORY ARE NOT AS THEY SHOULD BE")
    return 0 if held else 1


def _without_compiler() -> Any:
    return patch("torch.compile", partial(torch.compile, backend="aot_eager"))


def _measured(
    check: str, dry: bool, whole: bool, groups: Any, device: torch.device, deadline: float
) -> Iterator[dict[str, Any]]:
    if check == "equality":
        yield from equality(DRY.but(dropout=0.1) if dry else EQUAL, groups, device)
    elif check == "memory":
        base = DRY.but(layers=2) if dry else HELD
        for dropout, modes in ((0.0, ("none", "full")), (0.1, ("none", "selective", "full"))):
            for mode in modes:
                name = f"dropout {dropout}, recompute {mode}"
                yield memory(base.but(name=name, dropout=dropout, recompute=mode), groups, device)
                gc.collect()
    else:
        for case in [DRY] if dry else FAST:
            for contender in CONTENDERS:
                if time.perf_counter() > deadline:
                    yield {"case": case.name, "contender": contender, "step_s": None}
                    continue
                yield speed(case, contender, groups, device, whole)
                gc.collect()
                torch.compiler.reset()


def _shown(check: str, rows: list[dict[str, Any]]) -> str:
    cells, right = {"equality": (_equality, ()), "memory": (_memory, range(1, 7)), "speed": (_speed, range(2, 7))}[
        check
    ]
    header, *lines = cells(rows)
    return table(header, lines, right=tuple(right))


def _equality(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("precision", "blocks", "loss", "norm", "gradient", "weight", "allowed", "equal")
    for row in rows:
        errors = (f"{row['largest_error'][what]:.1e}" for what in ("loss", "norm", "gradient", "weight"))
        blocks = "compiled" if row["compiled"] else "eager"
        yield row["precision"], blocks, *errors, f"{row['tolerance']:.0e}", _yes(row["ok"])


def _memory(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("memory", "states", "held for backward", "predicted", "peak", "predicted", "ratio", "as predicted")
    for row in rows:
        sizes = (human_bytes(row[key]) for key in ("states", "held", "held_predicted", "peak", "peak_predicted"))
        yield row["case"], *sizes, f"{row['peak'] / row['peak_predicted']:.3f}", _yes(row["ok"])


def _speed(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    yield ("model", "", "tokens/s", "step s", "MFU", "peak", "first steps s")
    for row in rows:
        title = TITLES[row["contender"]]
        if row["step_s"] is None:
            yield row["case"], title, "no time", "", "", "", ""
            continue
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        figures = (
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_s']:.3f}",
            mfu,
            human_bytes(row["peak_bytes"]) if row["peak_bytes"] else "",
        )
        yield row["case"], title, *figures, f"{row['first_steps_s']:.0f}"


def _yes(ok: bool) -> str:
    return "yes" if ok else "NO"


if __name__ == "__main__":
    sys.exit(main())
