"""What a program sends: every collective of a step, by group, with its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from meg_compile.graph.nodes import PRODUCTS, base_name, operand
from meg_compile.ops.collectives import (
    copy_to_tp,
    cut_sequence,
    gather_sequence,
    gather_to_tp,
    reduce_from_tp,
    scatter_from_tp,
)
from meg_compile.ops.context import context_attention
from meg_compile.ops.vocabulary import vocab_cross_entropy
from meg_compile.passes.blocks import find_repeated

if TYPE_CHECKING:
    from meg_compile.program import Program


@dataclass(frozen=True)
class Collective:
    """One kind of message that a rank of a stage sends.

    kind:       "all_reduce", "all_gather", "reduce_scatter", or "send" (to the next or previous stage).
    group:      the mesh dim it spans: "tp", "cp", "pp", "dp", "dp_cp", "tied" (stages with a copy of a tied parameter),
                "world".
    when:       "forward" or "backward" of a micro-batch, or "step", once.
    what:       the value that moves.
    comm_bytes: bytes of the value, whole: what an all-gather gives, what a reduce-scatter takes.
    stage:      the stage whose ranks send it; None for all.
    """

    kind: str
    group: str
    when: str
    what: str
    comm_bytes: int
    stage: int | None

    def per_step(self, num_micro_batches: int) -> int:
        """Bytes per step and rank."""
        return self.comm_bytes * (1 if self.when == "step" else num_micro_batches)


def collectives(program: Program) -> list[Collective]:
    """All messages of a training step, in no particular order. An axis of one rank sends nothing."""
    plan, found = program.plan, []
    for stage in program.stages:
        repeated = find_repeated(stage.graph, plan)
        for node in stage.graph.nodes:
            group = "cp" if node.target is context_attention else "tp"
            messages = _of_node(node, plan.cp)
            if node in repeated:
                messages += [
                    (kind, "backward", f"{what} again", size)
                    for kind, when, what, size in messages
                    if when == "forward"
                ]
            elif node.target is gather_to_tp and any(_keeps(user, node) for user in node.users):
                messages.append(("all_gather", "backward", f"{node.args[0]} again", _bytes(node.meta["val"])))
            found += [Collective(kind, group, when, what, size, stage.index) for kind, when, what, size in messages]
        for when, values, other in (("forward", stage.sent, 1), ("backward", stage.received, -1)):
            if values and plan.rank_of(stage.index) != plan.rank_of(stage.index + other):
                found += [
                    Collective("send", "pp", when, f"activation {i}", _bytes(value), stage.index)
                    for i, value in enumerate(values)
                    if when == "forward" or value.requires_grad
                ]
        for name in stage.params:
            found += _of_gradient(program, name, stage.index)
            found += _of_parameter(program, name, stage.index)
    if plan.mesh.size > 1:
        found.append(Collective("all_reduce", "world", "step", "checksums and counts", 8 * 4 * plan.dp, None))
        found.append(Collective("all_reduce", "world", "step", "loss and gradient norm", 8 * 2, None))
    return found


_MOVES = {  # operator: (forward, backward, which of operand and result is the whole value)
    copy_to_tp: (None, "all_reduce", "result"),
    reduce_from_tp: ("all_reduce", None, "result"),
    gather_to_tp: ("all_gather", "reduce_scatter", "result"),
    scatter_from_tp: ("reduce_scatter", "all_gather", "operand"),
    gather_sequence: ("all_gather", None, "result"),
    cut_sequence: (None, "all_gather", "operand"),
}


def _of_node(node: fx.Node, cp: int) -> list[tuple[str, str, str, int]]:
    """(kind, when, what, bytes) of what one operator sends over tp or cp."""
    if node.target is context_attention:
        moved = [(str(n), cp * _bytes(n.meta["val"])) for n in (operand(node, 1), operand(node, 2))]
        return [("all_gather", "forward", what, size) for what, size in moved] + [
            ("reduce_scatter", "backward", f"gradient of {what}", size) for what, size in moved
        ]
    if node.target in _MOVES:
        forward, backward, whole = _MOVES[node.target]
        size = _bytes((operand(node, 0) if whole == "operand" else node).meta["val"])
        what = str(node.args[0])
        found = [] if forward is None else [(forward, "forward", what, size)]
        if backward is not None and node.meta["grad"]:
            found.append((backward, "backward", f"gradient of {what}", size))
        return found
    if node.target is vocab_cross_entropy:
        logits = operand(node, 0).meta["val"]
        rows = logits.shape[0] * (8 if logits.dtype == torch.float64 else 4)
        return [
            ("all_reduce", "forward", "largest logit", rows),
            ("all_reduce", "forward", "sum of exponentials, target logit", 2 * rows),
        ]
    return []


def _keeps(product: fx.Node, factor: fx.Node) -> bool:
    """Whether a product needs a factor again in backward, for the gradient of the other."""
    others = (n for n in product.all_input_nodes if n is not factor)
    return base_name(product.target) in PRODUCTS and any(n.meta.get("grad") for n in others)


def _of_gradient(program: Program, name: str, stage: int) -> list[Collective]:
    """What the gradient of one parameter costs once a step, on the first stage of a rank that reads it."""
    spec, plan = program.params[name], program.plan
    here = [s for s in spec.stages if program.pp_rank_of(s) == program.pp_rank_of(stage)]
    if not spec.trainable or stage != here[0]:
        return []
    split, size = program.splits(spec), program.share(spec) * spec.held.itemsize
    groups = {
        "tp": spec.partial and plan.tp > 1,
        "tied": len(program.holders(spec)) > 1,
        "_".join(dim for dim in ("dp", "cp") if getattr(plan, dim) > 1): plan.dp * plan.cp > 1 and not split,
        "cp" if split else "": plan.cp > 1 and split,
    }
    found = [
        Collective("all_reduce", group, "step", f"gradient of {name}", size, stage)
        for group, sent in groups.items()
        if sent
    ]
    if split:
        when = "step" if plan.zero == 1 else "backward"
        found.append(Collective("reduce_scatter", "dp", when, f"gradient of {name}", size * plan.dp, stage))
    return found


def _of_parameter(program: Program, name: str, stage: int) -> list[Collective]:
    """What it costs to make whole what replicas share: once a step, or (zero=3) for each forward and backward."""
    spec, plan = program.params[name], program.plan
    if not program.splits(spec):
        return []
    whole = program.share(spec) * plan.dp * spec.dtype.itemsize
    when = ("forward", "backward") if plan.zero == 3 else ("step",)
    return [Collective("all_gather", "dp", one, f"shard of {name}", whole, stage) for one in when]


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
