"""Measure compiled programs against the plain module, against code written by hand, and against DTensor.

Prints, for each pair and size, ours / theirs in seconds of a training step on the CPU, one thread a rank: the median
over the steps of the ratio within one step, and its quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.contests import KEYS
from benchmarks.measure import measure
from benchmarks.model import Size
from meg_compile.explain.table import table

HEADER = ("pair", "size", "ratio", "quartiles", "bar", "met", "CPU ratio", "step s", "CPU s")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--sizes", type=Size.parse, nargs="+", default=[Size(4, 256), Size(6, 512)], metavar="LxC")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each contender (15)")
    parser.add_argument("--only", nargs="+", choices=KEYS, default=KEYS, help="the pairs to measure (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    rows = measure(args.sizes, args.steps, args.only)
    print(table(HEADER, map(_cells, rows), right=(2, 4, 6)))
    print(f"\n{args.steps} steps each, in turn; {time.perf_counter() - started:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["quartiles"]
    return (
        row["title"],
        row["size"],
        f"{row['ratio']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{row['bar']:.2f}",
        "yes" if row["met"] else "NO",
        f"{row['cpu_ratio']:.3f}",
        " / ".join(f"{s:.3f}" for s in row["wall_s"]),
        " / ".join(f"{s:.3f}" for s in row["cpu_s"]),
    )


if __name__ == "__main__":
    main()
