"""What the ejected program reads besides its stages: which rank holds what, how losses add up, constants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from meg_compile.eject.expression import Expressions
from meg_compile.eject.function import Body

if TYPE_CHECKING:
    from meg_compile.program import ParamSpec, Program


def shards(program: Program, num_micro_batches: int) -> str:
    """shards.json: the plan, the fields of a batch, and a line for each parameter and buffer."""
    plan = {name: getattr(program.plan, name) for name in ("tp", "cp", "dp", "pp", "vpp", "sp", "schedule")}
    plan |= {"rank_of_stage": [program.pp_rank_of(stage.index) for stage in program.stages]}
    plan |= {"micro_batch_size": program.micro_batch_size, "num_micro_batches": num_micro_batches}
    fields = {
        name: {
            "shape": list(x.shape),
            "dtype": _dtype(x.dtype),
            "sequence": program.parts.get(name),
            "limits": [(limit.size, limit.ignored) for limit in program.limits if limit.field == name],
        }
        for name, x in program.inputs.items()
    }
    parameters = {name: _parameter(spec) for name, spec in program.params.items()}
    sections = {"plan": {"": plan}, "fields": fields, "parameters": parameters}
    return "{\n" + ",\n".join(_section(name, rows) for name, rows in sections.items()) + "\n}\n"


def _section(name: str, rows: dict[str, Any]) -> str:
    """A line for each row; one without a name is the section itself."""
    if list(rows) == [""]:
        return f' "{name}": {json.dumps(rows[""])}'
    lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
    return f' "{name}": {{\n' + ",\n".join(lines) + "\n }"


def _parameter(spec: ParamSpec) -> dict[str, Any]:
    """runs: for each tp rank, of each dim that is cut, the [start, length] of its entries; null where it is whole."""
    return {
        "shape": list(spec.shape),
        "dtype": _dtype(spec.dtype),
        "held": _dtype(spec.held),
        "stages": list(spec.stages),
        "local_shape": list(spec.local_shape),
        "runs": [shard.runs for shard in spec.shards] if spec.sharded else None,
        "partial_gradient": spec.partial,
        "trainable": spec.trainable,
        "buffer": spec.buffer,
        "in_state_dict": spec.persistent,
        "aliases": list(spec.aliases),
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def constants(program: Program) -> dict[str, torch.Tensor]:
    """The values of the buffers and constants that no state_dict holds, whole."""
    wanted = {name for name, spec in program.params.items() if not spec.persistent}
    if not wanted:
        return {}
    assert program.source is not None
    found = dict(program.source.replay(lambda name: torch.clone if name in wanted else None))
    for name in wanted - found.keys():
        found[name] = program.source.value(program.captured.tensors[name]).clone()
    return {name: found[name].to(program.params[name].dtype) for name in sorted(wanted)}


def loss_source(program: Program, expressions: Expressions) -> str:
    """loss.py: what the loss of a micro-batch is multiplied by."""
    units, functions, names = program.units, [], []
    for i, counter in enumerate(units.counters):
        body = Body(counter.graph, expressions, str)
        inputs = [node for node in counter.graph.nodes if node.op == "placeholder" and node.users]
        for node in inputs:
            body.keep(node)
        for node in counter.graph.nodes:
            body.add(node)
        body.rows = [(code, "") for code, _ in body.rows]
        output = next(n for n in reversed(counter.graph.nodes) if n.op == "output")
        body.line(f"return {body.spell(output.args[0])}")
        names.append("counted" if i == 0 else f"counted_{i}")
        parts = [*(body.names[n] for n in inputs), "**others"]
        doc = '    """How many labels of a micro-batch count."""\n'
        functions.append(f"def {names[-1]}({', '.join(parts)}):\n{doc}{body.text(4)}")
    if units.tokens:
        what = "The loss of a micro-batch is a sum over labels; that of the batch is their mean."
        lines = [f"return 1 / sum(int({names[0]}(**batch)) for batch in micro_batches)"]
    elif units.summed:
        what, lines = "The loss is a sum over rows.", ["return 1.0"]
    elif units.coupled:
        what = "The loss couples the rows of a batch, so that there can be one micro-batch only."
        lines = ["if len(micro_batches) > 1:", '    raise SystemExit("use one micro-batch")', "return 1.0"]
    else:
        what = "The loss of the batch is the mean of those of its micro-batches."
        counts = " ".join(f"int({name}(**batch))," for name in names)
        check = [f"counts = {{({counts}) for batch in micro_batches}}", "if len(counts) > 1:"]
        check += ['    raise SystemExit("micro-batches count different numbers of labels")']
        lines = (check if names else []) + ["return 1 / len(micro_batches)"]
    scale = "def scale(micro_batches):\n" + f'    """{what}"""\n' + "".join(f"    {line}\n" for line in lines)
    text = "\n\n".join([*functions, scale])
    imports = "import torch\n\n\n" if "torch." in text else "\n"
    return f'"""What the loss of every micro-batch is multiplied by, given all of them."""\n\n{imports}{text}'
