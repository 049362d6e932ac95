"""Which models compile as they are, what of them runs in parallel, and how far the numbers are from the plain model's.

    python -m benchmarks.zoo                 # print both tables
    python -m benchmarks.zoo --readme        # and write them into README.md, between <!-- zoo --> and <!-- /zoo -->
    python -m benchmarks.zoo --only Llama T5

Small models are trained for two steps in float64 under each plan, ranks as threads, and everything is compared with the
plain model: the loss, every gradient and every weight. Full-size ones are compiled on meta tensors, without storage.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.against_plain import Trial, largest_error
from benchmarks.families import FAMILIES, FULL_SIZE, Family
from benchmarks.styles import STYLES, Style
from meg_compile.compiler import compile
from meg_compile.errors import MegError
from meg_compile.explain.linears import find_linears
from meg_compile.explain.table import human_count
from meg_compile.plan import Plan
from meg_compile.program import Program

ZOO: dict[str, Family | Style] = {**FAMILIES, **STYLES}
PLANS = (Plan(tp=2), Plan(tp=4), Plan(pp=2), Plan(tp=2, pp=2))
FULL_PLAN = Plan(tp=8, pp=2)
CLEAR = "\r\033[K" if sys.stderr.isatty() and sys.stdout.isatty() else ""
START, END = "<!-- zoo -->", "<!-- /zoo -->"
README = Path(__file__).resolve().parents[1] / "README.md"


def num_pairs(program: Program) -> int:
    """Row-parallel products: each ends a pair, whatever the number of Linears that it starts with."""
    return sum(linear.role == "row" for linear in find_linears(program))


def small_row(name: str, entry: Family | Style, say: Callable[[str], None]) -> str:
    about, errors = [], []
    for plan in PLANS:
        say(f"{name}: {plan}")
        started = time.process_time()
        try:
            trial = Trial(entry, plan)
        except MegError as error:
            return f"| {name} | {_reason(error)}" + " |" * (4 + len(PLANS))
        if not about:
            program, seconds = trial.program, time.process_time() - started
            sizes = len(find_linears(program)), num_pairs(program)
            about = [*map(str, sizes), f"{program.parallel_flops().share:.0%}", f"{seconds:.1f} s"]
        errors.append(f"{largest_error(trial.run()):.0e}")
    return "| " + " | ".join([name, *about, *errors]) + " |"


def full_row(name: str, family: Family, say: Callable[[str], None]) -> str:
    say(f"{name}: {FULL_PLAN}")
    started = time.process_time()
    try:
        program = compile(family.build, family.batch(0), FULL_PLAN, None, torch.bfloat16)
    except MegError as error:
        return f"| {name} | {_reason(error)} | | | | |"
    seconds, params = time.process_time() - started, program.params.values()
    sizes = [human_count(sum(p.numel for p in params)), human_count(max(_held(program, s) for s in range(2)))]
    share = program.parallel_flops().share
    return f"| {name} | {' | '.join(sizes)} | {num_pairs(program)} | {share:.1%} | {seconds:.0f} s |"


def _held(program: Program, stage: int) -> int:
    return sum(program.params[name].local_numel for name in program.stages[stage].params)


def _reason(error: MegError) -> str:
    said = " ".join(str(error).split("\n")[1:] or [str(error)]).strip()
    return "refused: " + said.replace("|", "/")


def small_table(names: list[str], say: Callable[[str], None]) -> Iterator[str]:
    head = ["model", "Linears", "pairs", "FLOPs in parallel", "compile", *map(str, PLANS)]
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for name in names:
        yield small_row(name, ZOO[name], say)


def full_table(names: list[str], say: Callable[[str], None]) -> Iterator[str]:
    yield f"| {FULL_PLAN} | parameters | of a rank | pairs | FLOPs in parallel | compile |"
    yield "|---|" + "---:|" * 5
    for name in names:
        yield full_row(name, FULL_SIZE[name], say)


def write_between(text: str, block: str) -> str:
    """The text with what stands between the two markers replaced. ValueError where it lacks them."""
    before, _, rest = text.partition(START)
    old, _, after = rest.partition(END)
    if not rest or not (after or old != rest):
        raise ValueError(f"README.md has no {START} ... {END}")
    return f"{before}{START}\n\n{block}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*ZOO, *FULL_SIZE], help="these models (all)")
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = args.only or [*ZOO, *FULL_SIZE]
    say = _progress(sum(len(PLANS) if name in ZOO else 1 for name in wanted))
    tables = small_table([n for n in wanted if n in ZOO], say), full_table([n for n in wanted if n in FULL_SIZE], say)
    block = "\n\n".join("\n".join(_printed(table)) for table in tables)
    if args.readme:
        README.write_text(write_between(README.read_text(encoding="utf-8"), block), encoding="utf-8")


def _printed(table: Iterator[str]) -> list[str]:
    """The lines of a table, printed as soon as they are there; none where it has no rows."""
    lines = []
    for line in table:
        lines.append(line)
        print(f"{CLEAR}{line}", flush=True)
    print()
    return lines if len(lines) > 2 else []


def _progress(total: int) -> Callable[[str], None]:
    """Says what is being done on one line of the terminal, with how far that is."""
    done = 0

    def say(what: str) -> None:
        nonlocal done
        done += 1
        print(f"{CLEAR}{done}/{total} {what}", end="" if CLEAR else "\n", file=sys.stderr, flush=True)

    return say


if __name__ == "__main__":
    main()
