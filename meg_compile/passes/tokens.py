"""Make the loss of a micro-batch a sum over counted units, so that any cut of a global batch weighs alike.

The mean over a global batch is the sum over all its counted tokens divided by their number, and that number is known
from the labels before the step starts. A mean over counted labels becomes a sum, in float32 or wider, and the labels'
own small graph counts. A mean over rows is the mean over micro-batches, and a sum over rows is their sum. A loss that
is none of these, since its rows see each other, is right for one micro-batch on one replica alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from meg_compile.errors import MegError
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import base_name, is_random, operand, upstream
from meg_compile.passes.rows import Part, Verdict, unclamped

aten = torch.ops.aten
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
WHOLE = "use plan.dp=1 and a train.micro_batch_size of the whole global batch"
HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Units:
    """What the loss of a micro-batch is a sum over.

    counters: per mean over counted labels, a module from the batch's fields to their number.
    tokens:   the loss is the sum over the first counter's targets; else each micro-batch is one unit, and the
              counters must agree over the micro-batches for their mean to be the plain model's.
    summed:   the loss is a sum over rows, and that of a global batch the sum over its micro-batches.
    coupled:  why only one micro-batch on one replica gives the plain model's loss; "" where any number does.
    unclear:  why that is not known; "" where it is.
    """

    counters: list[fx.GraphModule] = field(default_factory=list)
    tokens: bool = False
    summed: bool = False
    coupled: str = ""
    unclear: str = ""

    def count(self, micro_batches: list[dict[str, torch.Tensor]]) -> int:
        """Units in some micro-batches. MegError where a mean of means would not be the mean."""
        if self.coupled and len(micro_batches) > 1:
            raise MegError(f"the loss couples the rows of a batch ({self.coupled}): {WHOLE}")
        counts = [[_whole(c(**micro)) for c in self.counters] for micro in micro_batches]
        if self.tokens:
            return sum(row[0] for row in counts)
        if any(row != counts[0] for row in counts):
            raise MegError(
                "the loss holds a mean over counted labels inside a larger expression, and micro-batches count "
                "different numbers of them, so that their mean is not the global batch's mean: return that mean "
                f"itself, or {WHOLE}"
            )
        return len(micro_batches)

    def labels(self, micro_batch: dict[str, torch.Tensor]) -> int:
        """The counts of one micro-batch as one number, where those of all micro-batches must agree; else 0."""
        return 0 if self.tokens else sum(_whole(c(**micro_batch)) * 1009**i for i, c in enumerate(self.counters))

    def scale(self, num_counted: int) -> float:
        """What every loss of a micro-batch is multiplied by, where the global batch has so many units."""
        return 1.0 if self.summed else 1 / num_counted


def _whole(count: torch.Tensor) -> int:
    if count.is_floating_point() and not float(count).is_integer():
        raise MegError(
            f"the loss divides by the sum of weights in a batch, and {float(count)} is no count: give weights of 0 "
            f"and 1, or {WHOLE}"
        )
    return int(count)


def sum_over_tokens(captured: Captured, verdict: Verdict) -> Units:
    """Rewrite the graph's loss in place, in float32 or wider; says what it is a sum over."""
    units = _units(captured, verdict)
    output = next(n for n in reversed(captured.graph.nodes) if n.op == "output")
    _in_float32(captured.graph, operand(output, 0))
    return units


def _units(captured: Captured, verdict: Verdict) -> Units:
    parts = verdict.parts
    if verdict.coupled:
        return Units(coupled=verdict.coupled)
    if verdict.unclear:
        return _as_if_apart(captured, verdict)
    kinds = {part.kind for part in parts}
    if kinds == {"sum"} and not verdict.const:
        return Units(summed=True)
    if not kinds <= {"mean", "counted"}:
        return Units(coupled="it adds sums over rows to what is no sum")
    counters = []
    for part in parts:
        if part.kind == "counted":
            counters.append(_counter(captured, part.node))
            if counters[-1] is None:
                return Units(
                    coupled=f"{base_name(part.node.target)}: what it counts does not depend on the batch alone"
                )
    tokens = len(parts) == 1 and kinds == {"counted"} and not verdict.const
    if tokens:
        _sum_instead(captured.graph, parts[0])
    return Units(counters, tokens)


def _as_if_apart(captured: Captured, verdict: Verdict) -> Units:
    """Units of a loss that may couple rows, if it does not."""
    output = next(n for n in reversed(captured.graph.nodes) if n.op == "output")
    means = [n for n in captured.graph.nodes if base_name(n.target) in _LOSSES and n.args[3:4] in ((), (1,))]
    counters = [c for n in means if (c := _counter(captured, n)) is not None]
    tokens = len(counters) == 1 and means == [output.args[0]] and means[0].args[2:3] in ((), (None,))
    if tokens:
        _sum_instead(captured.graph, Part(means[0], "counted"))
    return Units(counters, tokens, unclear=verdict.unclear)


def _sum_instead(graph: fx.Graph, mean: Part) -> None:
    """Replace a mean over what counts by the sum of the same."""
    node = mean.node
    if base_name(node.target) in _LOSSES:
        _in_float32(graph, operand(node, 0))
        args = list(node.args) + [None, 1][len(node.args) - 2 :]
        args[3] = 2
        node.args = tuple(args)
        node.meta["val"] = node.meta["val"].to(operand(node, 0).meta["val"].dtype)
    else:
        total = operand(node, 0)
        if base_name(total.target) == "sum":
            _in_float32(graph, operand(total, 0))
            total.meta["val"] = total.meta["val"].to(operand(total, 0).meta["val"].dtype)
        node.replace_all_uses_with(total)
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _in_float32(graph: fx.Graph, node: fx.Node) -> None:
    """Widen a half-precision value for the readers that it has. Sums of many tokens do not fit in 8 or 11 bits."""
    if node.meta["val"].dtype not in HALVES:
        return
    with graph.inserting_after(node):
        wide = graph.call_function(aten.to.dtype, (node, torch.float32))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    wide.meta = dict(node.meta) | {"val": node.meta["val"].to(torch.float32)}


@dataclass(frozen=True)
class Limit:
    """A field of the batch holds indices: `size` rows or classes, besides `ignored` (None: every index counts).

    table: the parameter whose rows they are, of an embedding.
    """

    field: str
    size: int
    ignored: int | None
    table: str | None = None

    def check(self, batch: dict[str, torch.Tensor]) -> None:
        """MegError for an index outside: on shards it would be taken for a row of another rank."""
        values = batch[self.field]
        if self.ignored is not None:
            values = values[values != self.ignored]
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= self.size):
            worst = int(values.max()) if int(values.max()) >= self.size else int(values.min())
            raise MegError(
                f"data: {self.field} holds {worst}, and the model has {self.size} rows for it, 0 to {self.size - 1}: "
                "use a model with a larger vocabulary, or data with a smaller one"
            )


def find_limits(graph: fx.Graph) -> list[Limit]:
    """The fields that are looked up in an embedding or are the targets of a cross entropy, by reshaping alone."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or base_name(node.target) not in ("embedding", "cross_entropy_loss"):
            continue
        table, index = operand(node, 0), operand(node, 1)
        lookup = base_name(node.target) == "embedding"
        ignored = None if lookup else node.args[4] if len(node.args) > 4 else -100
        while index.op == "call_function" and base_name(index.target) in _RESHAPES:
            index = operand(index, 0)
        if index.op == "placeholder" and not index.meta["val"].is_floating_point():
            shape = table.meta["val"].shape
            size = shape[0] if lookup else shape[min(1, len(shape) - 1)]
            named = str(table.target) if lookup and table.op == "get_attr" else None
            found.append(Limit(str(index.target), size, ignored, named))
    return found


_RESHAPES = {"view", "reshape", "flatten", "contiguous", "slice", "to", "clone", "squeeze", "unsqueeze", "transpose"}


def _counter(captured: Captured, mean: fx.Node) -> fx.GraphModule | None:
    """What a mean divides by, from the batch's fields alone; None where it needs more."""
    is_loss = base_name(mean.target) in _LOSSES
    divisor = operand(mean, 1) if is_loss else unclamped(operand(mean, 1))
    needed = upstream([divisor])
    constants = {str(n.target): captured.tensors[str(n.target)] for n in needed if n.op == "get_attr"}
    if any(t.is_meta or t.requires_grad for t in constants.values()) or any(map(is_random, needed)):
        return None
    new, env = fx.Graph(), {}
    for node in captured.graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = new.node_copy(node, env.__getitem__)
    count = env[divisor]
    if is_loss:
        ignore = mean.args[4] if len(mean.args) > 4 else -100
        count = new.call_function(torch.sum, (new.call_function(operator.ne, (count, ignore)),))
    new.output(count)
    return fx.GraphModule(constants, new)
