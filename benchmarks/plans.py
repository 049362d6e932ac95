"""Does every plan compute what the plain model computes? `python -m benchmarks.plans`

Runs `task=verify` in float64 over plans in which every two choices (tp, pp, dp, cp, sp, vpp, schedule, zero, recompute)
that go together meet at least once, on up to 4 processes each, without dropout and with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import combinations, product
from pathlib import Path

from meg_compile.errors import Refused
from meg_compile.plan import RECOMPUTE, ZERO, Plan
from meg_compile.schedules import SCHEDULES

Choice = tuple[tuple[str, object], ...]

CHOICES = {
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "cp": (1, 2),
    "sp": (False, True),
    "vpp": (1, 2),
    "schedule": tuple(SCHEDULES),
    "zero": ZERO,
    "recompute": RECOMPUTE,
}


def valid_plans(most_ranks: int) -> list[Choice]:
    """Every combination that is a plan of its own: what would do nothing (sp without tp) is left out."""
    found = []
    for values in product(*CHOICES.values()):
        fields = dict(zip(CHOICES, values, strict=True))
        idle = (
            (fields["sp"] and fields["tp"] == 1)
            or (fields["zero"] and fields["dp"] == 1)
            or (fields["pp"] == 1 and fields["schedule"] != "1f1b")
        )
        try:
            plan = Plan(**fields)  # type: ignore[arg-type]
        except Refused:
            continue
        if not idle and 1 < plan.mesh.size <= most_ranks:
            found.append(tuple(fields.items()))
    return found


def covering(plans: list[Choice], least: int) -> list[Choice]:
    """Few plans, at least so many, in which each pair of choices meets that meets in any; the same ones every time."""
    pairs = {plan: set(combinations(plan, 2)) for plan in plans}
    uncovered = set().union(*pairs.values())
    chosen: list[Choice] = []
    while uncovered:
        best = max(plans, key=lambda plan: len(pairs[plan] & uncovered))
        chosen.append(best)
        uncovered -= pairs[best]
    every = max(1, len(plans) // max(1, 3 * least))
    spread = [plan for plan in plans[::every] if plan not in chosen]
    return chosen + spread[: max(0, least - len(chosen))]


def verify(plan: Choice, dropout: float) -> tuple[str, float]:
    """(status, largest relative error) of one run."""
    settings = [f"plan.{key}={str(value).lower()}" for key, value in plan]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "run.py", "task=verify", "precision=fp64", "plan=single", "verify.steps=2"]
        command += [f"model.dropout={dropout}", "train.global_batch_size=8", "train.micro_batch_size=1"]
        done = subprocess.run(
            [*command, *settings, f"hydra.run.dir={run}"], capture_output=True, text=True, timeout=300
        )
        if not (run / "result.json").is_file():
            return done.stderr.strip().splitlines()[-1], float("inf")
        result = json.loads((run / "result.json").read_text())
        return result["status"], max(result.get("largest_error", {"": float("inf")}).values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--least", type=int, default=60, help="plans at least (60)")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    args = parser.parse_args()
    plans = covering(valid_plans(most_ranks=4), args.least)
    print(f"{len(plans)} plans of {len(valid_plans(4))}, dropout {args.dropout}", flush=True)
    bad, worst, started = 0, 0.0, time.perf_counter()
    for dropout, plan in product(args.dropout, plans):
        status, error = verify(plan, dropout)
        shown = " ".join(f"{key}={value}" for key, value in plan if value not in (1, 0, False, "none"))
        print(f"{status:7} {error:.1e}  dropout={dropout} {shown}", flush=True)
        bad += not (status == "ok" and error < 1e-9)
        worst = max(worst, error)
    seconds = time.perf_counter() - started
    print(f"{bad} of {len(plans) * len(args.dropout)} failed; largest error {worst:.1e}; {seconds:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
