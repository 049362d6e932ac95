"""Eject: a compiled program as source that runs with torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from meg_compile.eject.blocks import Classes
from meg_compile.eject.expression import Expressions
from meg_compile.eject.limits import eject_faults
from meg_compile.eject.readme import readme
from meg_compile.eject.shake import local, write_operators
from meg_compile.eject.stages import blocks_source, stage_source
from meg_compile.eject.tables import constants, loss_source, shards
from meg_compile.errors import Fault, Refused
from meg_compile.schedules import SCHEDULES

if TYPE_CHECKING:
    from meg_compile.program import Program

__all__ = ["eject", "eject_faults"]

RUNNER = Path(__file__).parent / "runner"


def eject(program: Program, directory: Path, num_micro_batches: int | None = None) -> None:
    """Write a program into a new directory: main.py, stage0.py and so on, blocks.py, shards.json, README.md.

    num_micro_batches: of a replica in a step, unless main.py is told otherwise; None for as few as fill the pipeline.
    Refused, before anything is written, for a plan that main.py does not run, or a directory that is not empty.
    """
    found = eject_faults(program)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        found.append(Fault("directory", directory, "is there already, with something in it", "name a new one"))
    if found:
        raise Refused(found)
    plan = program.plan
    num_micro_batches = num_micro_batches or SCHEDULES[plan.schedule].near(plan.pp, plan.pp)[0]
    classes = Classes(Expressions(), plan.cp > 1, plan.recompute == "full")
    used = {("meg_compile.ops.group", "Group")}
    files = {}
    for stage in program.stages:
        files[f"stage{stage.index}.py"], operators = stage_source(program, stage, classes)
        used |= operators
    if classes.sources:
        files["blocks.py"] = blocks_source(classes)
    if "dropout_keys" in program.inputs:
        used.add(("meg_compile.ops.counted", "row_keys"))
    files["loss.py"] = loss_source(program, classes.expressions)
    files["shards.json"] = shards(program, num_micro_batches)
    files |= {name: local((RUNNER / name).read_text(encoding="utf-8")) for name in ("main.py", "parts.py")}
    beside = constants(program)
    files["README.md"] = readme(program, [*files, "ops/", *(["constants.pt"] if beside else [])])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    if beside:
        torch.save(beside, directory / "constants.pt")
    write_operators(directory / "ops", used | classes.operators)
