"""The files of the stages: one class each, which calls the classes of blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch import fx

from meg_compile.eject.blocks import Block, Classes, attribute
from meg_compile.eject.function import WIDTH, Body, wrap
from meg_compile.explain.text import describe
from meg_compile.passes.partition import Stage

if TYPE_CHECKING:
    from meg_compile.program import Program


def stage_source(program: Program, stage: Stage, classes: Classes) -> tuple[str, set[tuple[str, str]]]:
    """(the file of a stage, the operators of `meg_compile.ops` that it calls)."""
    outer, blocks = classes.outline(stage.graph)
    body = Body(outer, classes.expressions, attribute, classes.cp)
    inputs = [node for node in outer.nodes if node.op == "placeholder"]
    received, fields = inputs[: len(stage.received)], inputs[len(stage.received) :]
    for node in fields:
        body.keep(node)
    for node in received:
        body.name(node, "x")
    chains = _chains(outer, blocks)
    body.wanted = {start: "x" for chain in chains if isinstance(chain, Chain) and (start := _only_for(chain))}
    for chain in chains:
        if isinstance(chain, fx.Node):
            body.add(chain)
        else:
            _call(body, chain, blocks, classes.recompute)
    output = next(n for n in reversed(outer.nodes) if n.op == "output")
    value = output.args[0]
    body.line(f"return {', '.join(map(body.spell, value)) if isinstance(value, (tuple, list)) else body.spell(value)}")

    arguments = ["self", *(body.names[n] for n in received)]
    arguments += ["*", *(body.names[n] for n in fields)] if fields else []
    arguments += ["**others"] if program.plan.vpp > 1 else []
    forward = "\n".join(f"    {line}" for line in wrap(f"def forward({', '.join(arguments)})", WIDTH - 5))
    text = body.text(8)
    kinds = sorted({block.kind for block in blocks.values()})
    imports = [*([f"from blocks import {', '.join(kinds)}"] if kinds else []), "from parts import Stage"]
    head = [
        f'"""{_title(program, stage)}"""',
        "",
        *_imports(text, body.operators, imports, bool(stage.received or stage.sent)),
        "",
        "",
        f"class Stage{stage.index}(Stage):",
        f"    INDEX, FIELDS = {stage.index}, {_tuple(stage.fields)}",
        f"    RECEIVED = {_examples(stage.received)}",
        f"    SENT = {_examples(stage.sent)}",
        f"    BLOCKS = {_mapping(blocks.values())}",
        "",
        f"{forward}:",
    ]
    return "\n".join(head) + "\n" + text, body.operators


def blocks_source(classes: Classes) -> str:
    """The file of the classes of blocks."""
    text = "\n\n".join(
        f"class {kind}(Part):\n"
        + "\n".join(f"    {line}" for line in _docstring(classes.layers[kind]))
        + f"\n\n{source}"
        for kind, source in classes.sources.items()
    )
    imports = _imports(text, classes.operators, ["from parts import Part"])
    title = '"""The blocks of the model, each as one rank of tensor parallelism runs it."""'
    return "\n".join([title, "", *imports]) + f"\n\n\n{text}"


def _imports(text: str, operators: Iterable[tuple[str, str]], own: list[str], torch_too: bool = False) -> list[str]:
    """What a file imports: torch as far as its text calls it, operators, and `own`."""
    ours: dict[str, list[str]] = {}
    for module, name in sorted(operators):
        ours.setdefault(module.rpartition(".")[2], []).append(name)
    lines = [*own, *(f"from ops.{module} import {', '.join(names)}" for module, names in ours.items())]
    library = ["import torch"] if torch_too or re.search(r"\btorch\.", text) else []
    library += ["import torch.nn.functional as F"] if re.search(r"\bF\.", text) else []
    library += ["from torch.utils.checkpoint import checkpoint"] if "checkpoint(" in text else []
    return [*library, *([""] if library else []), *(line for one in sorted(lines) for line in wrap(one, WIDTH))]


def _title(program: Program, stage: Stage) -> str:
    layers = f"{stage.layers[0]} to {stage.layers[-1]}" if len(stage.layers) > 1 else "".join(stage.layers)
    where = f"Stage {stage.index} of {len(program.stages)}"
    where += f", on pipeline rank {program.pp_rank_of(stage.index)}" if program.plan.pp > 1 else ""
    return f"{where}: {layers or 'no blocks'}."


def _tuple(names: Sequence[str]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "") + ")"


def _examples(tensors: Sequence[torch.Tensor]) -> str:
    said = [
        f'torch.empty({list(t.shape)}, dtype={t.dtype}, device="meta"{", requires_grad=True" * t.requires_grad})'
        for t in tensors
    ]
    if len(said) > 1:
        return "(\n" + "".join(f"        {one},\n" for one in said) + "    )"
    return f"({said[0]},)" if said else "()"


def _mapping(blocks: Iterable[Block]) -> str:
    """{"h.0": Block, ...}, as comprehensions over numbers where these follow one another."""
    runs: list[list[Block]] = []
    for block in sorted(blocks, key=lambda b: (_stem(b.layer), _number(b.layer))):
        before = runs[-1][-1] if runs else None
        if before and _follows(before, block):
            runs[-1].append(block)
        else:
            runs.append([block])
    parts = []
    for run in runs:
        if len(run) < 3:
            parts += [f'"{block.layer}": {block.kind}' for block in run]
        else:
            numbers = _range(_number(run[0].layer), len(run))
            parts.append(f'**{{f"{_stem(run[0].layer)}{{i}}": {run[0].kind} for i in {numbers}}}')
    if len(runs) == 1 and len(runs[0]) > 2:
        return parts[0].removeprefix("**")
    line = "{" + ", ".join(parts) + "}"
    if len(line) < WIDTH - 20:
        return line
    return "{\n" + "".join(f"        {part},\n" for part in parts) + "    }"


def _range(start: int, num: int) -> str:
    return f"range({start}, {start + num})" if start else f"range({num})"


def _stem(layer: str) -> str:
    return layer[: len(layer) - len(layer.rpartition(".")[2])]


def _number(layer: str) -> int:
    return int(layer.rpartition(".")[2])


def _follows(one: Block, other: Block) -> bool:
    alike = _stem(one.layer) == _stem(other.layer) and one.kind == other.kind
    return alike and _number(one.layer) + 1 == _number(other.layer)


@dataclass
class Chain:
    """Calls of equal blocks one after the other; `at` is the argument that each gets from the one before."""

    calls: list[fx.Node]
    at: int = 0


def _chains(graph: fx.Graph, blocks: dict[str, Block]) -> list[fx.Node | Chain]:
    found: list[fx.Node | Chain] = []
    for node in graph.nodes:
        if node.op == "call_module":
            last = found[-1] if found else None
            if isinstance(last, Chain) and _continues(last, node, blocks):
                last.at = [a is last.calls[-1] for a in node.args].index(True)
                last.calls.append(node)
            else:
                found.append(Chain([node]))
        elif node.op == "call_function":
            found.append(node)
    return found


def _continues(chain: Chain, node: fx.Node, blocks: dict[str, Block]) -> bool:
    last = chain.calls[-1]
    if not _follows(blocks[str(last.target)], blocks[str(node.target)]) or list(last.users) != [node]:
        return False
    changed = [i for i, (a, b) in enumerate(zip(last.args, node.args, strict=True)) if a is not b]
    if len(changed) != 1 or node.args[changed[0]] is not last:
        return False
    firsts = [blocks[str(n.target)].first_site for n in (*chain.calls, node)]
    steps = {b - a for a, b in pairwise(firsts) if a is not None and b is not None}
    return len(chain.calls) == 1 or (changed[0] == chain.at and len(steps) <= 1)


def _call(body: Body, chain: Chain, blocks: dict[str, Block], recompute: bool) -> None:
    """Write the call of a block, or the loop over several."""
    first, last = chain.calls[0], chain.calls[-1]
    block = blocks[str(first.target)]
    if len(chain.calls) == 1:
        name = body.name(first, "x")
        given = [body.spell(arg) for arg in first.args] + _site(block.first_site, None, block)
        body.line(f"{name} = {_called(attribute(block.layer), given, recompute)}", _comment(first))
        return
    start = _only_for(chain)
    if start is not None:
        name = body.names[last] = body.names[start]
    else:
        name = body.name(last, "x")
        body.line(f"{name} = {body.spell(first.args[chain.at])}")
    given = [name if i == chain.at else body.spell(arg) for i, arg in enumerate(first.args)]
    second = blocks[str(chain.calls[1].target)]
    given += _site(block.first_site, second.first_site, block)
    stem, number = _stem(block.layer).rstrip("."), _number(block.layer)
    body.line(f"for i in {_range(number, len(chain.calls))}:")
    holder = attribute(stem) if stem else "self"
    body.line(f"    {name} = {_called(f'{holder}[i]', given, recompute)}", _comment(last))


def _called(block: str, given: list[str], recompute: bool) -> str:
    if recompute:
        return f"checkpoint({', '.join([block, *given])}, use_reentrant=False)"
    return f"{block}({', '.join(given)})"


def _only_for(chain: Chain) -> fx.Node | None:
    """What a loop starts from, where nothing else reads it: the loop may have its name."""
    start = chain.calls[0].args[chain.at]
    assert isinstance(start, fx.Node)
    return start if len(chain.calls) > 1 and list(start.users) == chain.calls[:1] else None


def _site(first: int | None, second: int | None, block: Block) -> list[str]:
    """The number of a block's first dropout."""
    if first is None:
        return []
    if second is None:
        return [f"site={first}"]
    step = second - first
    start = first - step * _number(block.layer)
    return [f"site={step} * i" + (f" + {start}" if start > 0 else f" - {-start}" if start else "")]


def _comment(node: fx.Node) -> str:
    value = node.meta.get("val")
    return describe(node) if isinstance(value, torch.Tensor) else ""


def _docstring(layers: list[str]) -> list[str]:
    runs = []
    for _, group in groupby(enumerate(layers), lambda item: (_stem(item[1]), item[0] - _number(item[1]))):
        run = [layer for _, layer in group]
        runs.append(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}")
    text = f'"""{", ".join(runs)}."""'
    return [text] if len(text) < WIDTH - 8 else [f'"""{len(layers)} blocks, from {layers[0]} to {layers[-1]}."""']
