"""A program explained: as text for people, and as plain data (plan.json)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meg_compile.axes.atoms import Atom, atoms
from meg_compile.axes.op import how_to_add
from meg_compile.explain.linears import Linear, find_linears
from meg_compile.explain.table import human_bytes, human_count, human_flops, table
from meg_compile.explain.text import to_text
from meg_compile.explain.timeline import figures, timeline
from meg_compile.explain.traffic import Collective, collectives
from meg_compile.explain.unruled import find_unruled
from meg_compile.graph.nodes import locate, starred
from meg_compile.passes.labels import shifts_labels
from meg_compile.passes.partition import Stage

if TYPE_CHECKING:
    from meg_compile.program import Program

UNEVEN = 1.1  # a stage this many times as dear as the mean of all is pointed out


def explain(program: Program, num_micro_batches: int = 1, block: int = 0) -> str:
    """Everything that was decided, as text.

    num_micro_batches: of a step, for the bytes moved. block: the layer whose graph is printed.
    """
    sections = {
        "Plan": _plan(program),
        "Axes": _axes(program),
        "Pairs": _pairs(program),
        "Linears and embeddings": _linears(program),
        "Operators without a rule": _unruled(program),
        _graph_title(program, block): _graph(program, block),
        "Stages": _stages(program),
        f"Schedule {program.plan.schedule} of {_several(num_micro_batches, 'micro-batch')}": (
            timeline(program, num_micro_batches) if program.plan.pp > 1 else ""
        ),
        f"Bytes that a rank sends in a step of {_several(num_micro_batches, 'micro-batch')}": _traffic(
            program, num_micro_batches
        ),
    }
    return "\n\n".join(f"{title}\n{'=' * len(title)}\n{text}" for title, text in sections.items() if text) + "\n"


def to_dict(program: Program, num_micro_batches: int = 1) -> dict[str, Any]:
    """The same as plain data. A shard is given, for each tp rank, as [dim, [[start, length], ...]] of the whole."""
    return {
        "plan": asdict(program.plan) | {"world_size": program.plan.mesh.size},
        "micro_batch_size": program.micro_batch_size,
        "num_micro_batches": num_micro_batches,
        "loss": _loss(program),
        "axes": _axis_rows(program),
        "pairs": [{"axis": axis, "column": c, "row": r} for axis, c, r in _pair_rows(program)],
        "flops": program.parallel_flops()._asdict() | {"share": program.parallel_flops().share},
        "linears": [{k: v for k, v in vars(x).items() if not isinstance(v, frozenset)} for x in find_linears(program)],
        "operators_without_a_rule": [asdict(one) for one in find_unruled(program)],
        "params": {
            name: {
                "shape": spec.shape,
                "local_shape": spec.local_shape,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "held": str(spec.held).removeprefix("torch."),
                "shards": [shard.runs for shard in spec.shards] if spec.sharded else None,
                "stages": spec.stages,
                "aliases": spec.aliases,
                "partial_gradients": spec.partial,
                "split_over_replicas": program.splits(spec),
            }
            for name, spec in program.params.items()
        },
        "stages": [
            {
                "stage": s.index,
                "pp_rank": program.pp_rank_of(s.index),
                "layers": s.layers,
                "params_per_rank": params_of(program, s),
                "cost_share": _share(program, s),
            }
            for s in program.stages
        ],
        "timeline": figures(program, num_micro_batches),
        "collectives": [asdict(c) | {"step_bytes": c.per_step(num_micro_batches)} for c in collectives(program)],
    }


def params_of(program: Program, stage: Stage) -> int:
    """Trainable entries that one rank of a stage holds."""
    specs = (program.params[name] for name in stage.params)
    return sum(spec.local_numel for spec in specs if spec.trainable)


def _plan(program: Program) -> str:
    plan, params = program.plan, program.params.values()
    total = sum(spec.numel for spec in params if spec.trainable)
    return "\n".join(
        [
            f"  {human_count(total)} parameters ({total:,}), {plan.mesh.size} ranks: {plan}",
            f"  loss: {_loss(program)}",
        ]
    )


def _loss(program: Program) -> str:
    units = program.units
    if units.coupled:
        return f"couples the rows of a batch, so one micro-batch on one replica only ({units.coupled})"
    if units.unclear:
        return f"taken as a mean over rows, which is not known for sure ({units.unclear})"
    if units.tokens:
        shifts = ", which the model shifts itself" if shifts_labels(program.captured.graph) else ""
        return f"mean over all counted labels of the global batch{shifts}"
    return "sum over all rows of the global batch" if units.summed else "mean over all rows of the global batch"


def _axis_rows(program: Program) -> list[dict[str, Any]]:
    """Axes by name and size: how many there are, and what became of them."""
    layout, kinds = program.choice.layout, defaultdict(list)
    seen: set[Atom] = set()
    for dims in program.axes.stored.values():
        for atom in (a for dim in dims for a in atoms(dim)):
            if atom not in seen:
                seen.add(atom)
                kinds["/".join(sorted(atom.names)) or "unnamed", atom.size, _fate(atom, program)].append(atom)
    return [
        {"axis": name, "size": size, "count": len(group), "sharded": group[0] in layout.sharded, "why": fate}
        for (name, size, fate), group in sorted(kinds.items(), key=lambda item: item[0][0])
    ]


def _fate(atom: Atom, program: Program) -> str:
    layout = program.choice.layout
    if atom in layout.sharded:
        padding = -atom.size % layout.tp
        return f"sharded over {layout.tp} ranks" + (f", {padding} of padding" if padding else "")
    if atom.whole:
        return "whole: " + _anonymous(atom.whole)
    if atom in program.choice.refused:
        return "whole: " + _anonymous(program.choice.refused[atom])
    return "whole: " + ("tp=1" if program.plan.tp == 1 else "not both produced and contracted by Linears")


def _axes(program: Program) -> str:
    rows = [(r["axis"], r["size"], r["count"], r["why"]) for r in _axis_rows(program)]
    return table(("axis", "size", "count", "on tp ranks"), rows, right=(1, 2))


def _pair_rows(program: Program) -> list[tuple[str, list[str], list[str]]]:
    """(axis, modules that produce it, modules that contract it), one per sharded axis."""
    by_atom: dict[Atom, list[Linear]] = defaultdict(list)
    for linear in find_linears(program):
        for atom in linear.atoms:
            by_atom[atom].append(linear)
    return [
        (
            f"{'/'.join(sorted(atom.names)) or 'axis'} ({atom.size})",
            [x.module for x in linears if x.role in ("column", "vocab")],
            [x.module for x in linears if x.role == "row"],
        )
        for atom, linears in by_atom.items()
    ]


def _pairs(program: Program) -> str:
    rows = _pair_rows(program)
    if not rows:
        return "  none"
    grouped = _grouped((axis, _listed(c), _listed(r)) for axis, c, r in rows)
    return table(
        ("axis", "column-parallel, or by vocabulary", "row-parallel", "times"),
        [(*k, n) for k, n in grouped],
        (3,),
    )


def _linears(program: Program) -> str:
    total = program.parallel_flops().total or 1
    alike: dict[tuple[str, ...], list[Linear]] = defaultdict(list)
    for x in find_linears(program):
        shape, why = "x".join(map(str, x.shape)), x.axis or _anonymous(x.why)
        alike[starred(x.module), shape, x.role, why, x.source].append(x)
    rows = [(*row, len(group), f"{sum(x.flops for x in group) / total:.1%}") for row, group in alike.items()]
    header = ("module", "weight", "role", "axis, or why it is whole", "source", "times", "FLOPs")
    return f"{table(header, rows, (5, 6))}\n\n  {_parallel(program)}"


def _parallel(program: Program) -> str:
    flops = program.parallel_flops()
    own, whole = human_flops(flops.parallel, flops.total)
    of = "forward of one micro-batch" + " on one cp rank" * (program.plan.cp > 1)
    return f"{own} of {whole} run in parallel over tp ({flops.share:.1%}): products with weights and attention, {of}"


def _unruled(program: Program) -> str:
    found = find_unruled(program)
    if not found:
        return ""
    rows = [(x.operator, x.source, x.times, ", ".join(x.linears) or "none", f"{x.share:.1%}") for x in found]
    header = ("operator", "source", "times", "Linears that stay whole because of it", "FLOPs")
    hint = "\n".join(f"    {x.operator}: {how_to_add(x.operator)}" for x in {x.operator: x for x in found}.values())
    return f"{table(header, rows, (2, 4))}\n\n  What they touch is taken to be needed whole, also by sp and cp.\n{hint}"


def _block(program: Program, block: int) -> tuple[str, Stage]:
    """The name of a numbered block, or "" where the model has none, and the stage that runs it."""
    names = [(name, stage) for stage in program.stages for name in stage.layers]
    name, stage = names[min(block, len(names) - 1)]
    return (name if re.search(r"(^|\.)\d+(\.|$)", name) else ""), stage


def _graph_title(program: Program, block: int) -> str:
    name, stage = _block(program, block)
    if not name:
        return f"Graph of stage {stage.index} of a model without numbered blocks, on one tp rank"
    return f"Graph of layer {block} of {sum(len(s.layers) for s in program.stages)}, on one tp rank"


def _graph(program: Program, block: int) -> str:
    """Of one numbered block; of a model without them, of the whole stage."""
    name, stage = _block(program, block)
    nodes = [n for n in stage.graph.nodes if n.op == "call_function" and (not name or _inside(locate(n), name))]
    f, g = ("gather_to_tp", "scatter_from_tp") if program.plan.sp else ("copy_to_tp", "reduce_from_tp")
    legend = f"f is {f}, g is {g}; axis/n is sharded n ways."
    return _indent(f"{legend}\n{to_text(nodes)}")


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")


def _stages(program: Program) -> str:
    rows = []
    for stage in program.stages:
        layers = " .. ".join(dict.fromkeys((*stage.layers[:1], *stage.layers[-1:]))) or _without_layers(program, stage)
        size = params_of(program, stage)
        bytes_held = sum(program.weight_bytes(program.params[n]) for n in stage.params)
        rows.append(
            (
                stage.index,
                program.pp_rank_of(stage.index),
                layers,
                len(stage.layers),
                f"{size:,}",
                human_bytes(bytes_held),
                f"{_share(program, stage):.1%}",
            )
        )
    header = ("stage", "pp rank", "layers", "number", "params per rank", "bytes", "cost")
    text = table(header, rows, right=(0, 1, 3, 4, 5, 6))
    dearest = max(program.stages, key=lambda stage: stage.cost)
    over = _share(program, dearest) * len(program.stages)
    if over <= UNEVEN:
        return text
    return f"{text}\n  stage {dearest.index} costs {over:.2f} times the mean of all stages, and the others wait for it"


def _without_layers(program: Program, stage: Stage) -> str:
    """What a stage does that runs no layer, by where it stands."""
    if len(program.stages) == 1:
        return "all"
    ends = {0: "before the first", len(program.stages) - 1: "after the last"}
    return ends.get(stage.index, "none, passes on")


def _share(program: Program, stage: Stage) -> float:
    return stage.cost / (sum(s.cost for s in program.stages) or 1)


def _traffic(program: Program, num_micro_batches: int) -> str:
    sums: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for c in collectives(program):
        what = starred(re.sub(r"_?\d+", "", c.what)) if c.when != "step" else re.sub(r" of .*", "s", c.what)
        sums["all" if c.stage is None else c.stage, c.group, c.kind, c.when, what].append(c)
    rows = []
    for (stage, group, kind, when, what), found in sums.items():
        number = len(found) * (1 if when == "step" else num_micro_batches)
        step_bytes = sum(c.per_step(num_micro_batches) for c in found)
        rows.append((stage, group, kind, when, what, number, human_bytes(step_bytes)))
    if not rows:
        return "  none: one rank"
    return table(("stage", "group", "kind", "when", "what", "values", "bytes per step"), rows, right=(0, 5, 6))


def _several(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}es"


def _grouped(rows: Iterable[Hashable]) -> list[tuple[Any, int]]:
    """Equal rows once, in order of appearance, with how often they occur."""
    counts: dict[Hashable, int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return list(counts.items())


def _anonymous(reason: str) -> str:
    """A reason without the names of graph nodes, so that equal blocks read alike."""
    return re.sub(r" \(\w+\)", "", reason)


def _listed(modules: Iterable[str]) -> str:
    """Module paths without block numbers, each once."""
    return ", ".join(dict.fromkeys(map(starred, modules)))


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
