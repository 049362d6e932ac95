"""What the ejected program does not run, said before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meg_compile.eject.blocks import whole_blocks
from meg_compile.eject.expression import is_of_torch
from meg_compile.eject.function import OURS
from meg_compile.errors import Fault
from meg_compile.graph.nodes import RNG, base_name, in_source, is_random
from meg_compile.passes.blocks import find_blocks
from meg_compile.schedules import SCHEDULES

if TYPE_CHECKING:
    from torch import fx

    from meg_compile.program import Program


def eject_faults(program: Program) -> list[Fault]:
    """Every setting that main.py does not know, and every operator that it could not call."""
    plan, found = program.plan, []
    if plan.zero and plan.dp > 1:
        problem = "main.py keeps a whole copy of its states on every replica"
        found.append(Fault("plan.zero", plan.zero, problem, "use plan.zero=0, or plan.dp=1"))
    if plan.recompute == "selective":
        problem = "main.py recomputes whole blocks"
        found.append(Fault("plan.recompute", plan.recompute, problem, "use plan.recompute=none or full"))
    if plan.recompute == "full" and plan.recompute_every > 1:
        problem = "main.py recomputes every block"
        found.append(Fault("plan.recompute_every", plan.recompute_every, problem, "use plan.recompute_every=1"))
    if plan.recompute == "full" and any(
        find_blocks(s.graph).keys() - whole_blocks(s.graph).keys() for s in program.stages
    ):
        problem = "the model has layers that are no numbered modules which run in one go"
        found.append(Fault("plan.recompute", plan.recompute, problem, "use plan.recompute=none"))
    if plan.pp > 1 and SCHEDULES[plan.schedule].splits:
        others = ", ".join(s.name for s in SCHEDULES.values() if not s.splits and s.vpp in (None, plan.vpp))
        problem = "main.py runs backward in one part"
        found.append(Fault("plan.schedule", plan.schedule, problem, f"use one of {others}"))
    if any(spec.dtype == torch.float16 for spec in program.params.values() if spec.halved):
        found.append(Fault("precision", "fp16", "main.py scales no loss", "use precision=bf16, fp32 or fp64"))
    if clashing := [name for name in program.inputs if name in OURS or not name.isidentifier()]:
        problem = f"a field of the batch is called {clashing[0]}"
        found.append(Fault("task", "eject", problem, "give it a name that is free in Python"))
    if program.source is None and any(not spec.persistent for spec in program.params.values()):
        problem = "it was given on meta, and has constants that no state_dict holds"
        found.append(Fault("model", None, problem, "give a function that builds it"))
    counters = [counter.graph for counter in program.units.counters]
    nodes = [n for graph in (*(s.graph for s in program.stages), *counters) for n in graph.nodes]
    unknown = [n for n in nodes if n.op == "call_function" and not _is_known(n)]
    for name, node in {f"{node.target}": node for node in unknown}.items():
        problem = f"{name}{in_source(node)} is not one of torch's own operators"
        found.append(Fault("task", "eject", problem, "write it with torch's operators"))
    if any(n.op == "get_attr" for graph in counters for n in graph.nodes):
        problem = "its loss counts labels by a tensor of the model, which main.py does not have"
        found.append(Fault("task", "eject", problem, "use a loss without class weights"))
    if random := [n for n in nodes if _draws(n)]:
        problem = f"{base_name(random[0].target)}{in_source(random[0])} draws from torch's generators"
        found.append(Fault("dropout", "fast", problem, "use dropout=exact, or a model without dropout"))
    return found


def _is_known(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace in ("aten", "prims")
    module = getattr(node.target, "__module__", "") or ""
    return is_of_torch(node.target) or module == "_operator" or module.startswith("meg_compile.ops.")


def _draws(node: fx.Node) -> bool:
    if any(n.target == RNG for n in node.all_input_nodes):
        return True
    if base_name(node.target) == "scaled_dot_product_attention":
        return len(node.args) > 4 and bool(node.args[4])
    return is_random(node)
