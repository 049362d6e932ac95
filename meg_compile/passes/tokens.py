"""Make the loss of a micro-batch a sum over counted units, so that any cut of a global batch weighs alike.

The mean over a global batch is the sum over all its counted tokens divided by their number, and that number is known
from the labels before the step starts. A mean cross entropy at the end of the graph becomes a sum, in float32 or wider,
and the labels' own small graph counts. A loss of another kind is taken as it is: every micro-batch weighs the same.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from meg_compile.errors import MegError
from meg_compile.graph.nodes import base_name, operand

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
_CROSS_ENTROPY = aten.cross_entropy_loss.default


@dataclass
class Units:
    """What the loss of a micro-batch is a sum over.

    counters: per mean cross entropy, a module from the batch's fields to its number of counted targets.
    tokens:   the loss is the sum over the first counter's targets; else each micro-batch is one unit, and the
              counters must agree over the micro-batches for their mean to be the plain model's.
    """

    counters: list[fx.GraphModule]
    tokens: bool

    def count(self, micro_batches: list[dict[str, torch.Tensor]]) -> int:
        """Units in some micro-batches. MegError where a mean of means would not be the mean."""
        counts = [[int(c(**micro)) for c in self.counters] for micro in micro_batches]
        if self.tokens:
            return sum(row[0] for row in counts)
        if any(row != counts[0] for row in counts):
            raise MegError(
                "the loss holds a cross entropy inside a larger expression, and micro-batches count different numbers "
                "of labels, so that their mean is not the global batch's mean: return the cross entropy itself, or "
                "use plan.dp=1 and a train.micro_batch_size of the whole global batch"
            )
        return len(micro_batches)

    def labels(self, micro_batch: dict[str, torch.Tensor]) -> int:
        """The counts of one micro-batch as one number, where those of all micro-batches must agree; else 0."""
        return 0 if self.tokens else sum(int(c(**micro_batch)) * 1009**i for i, c in enumerate(self.counters))


def sum_over_tokens(graph: fx.Graph) -> Units:
    """Rewrite the graph's loss in place; says what it is a sum over."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    last = output.args[0]
    means = [n for n in graph.nodes if n.target is _CROSS_ENTROPY and _reduction(n) == 1]
    counters = [_counter(graph, n) for n in means]
    if any(c is None for c in counters):
        counters = []
    tokens = len(counters) == 1 and means == [last] and len(last.args) < 6
    if tokens:
        _in_float32(graph, operand(last, 0))
        args = list(last.args) + [None, 1][len(last.args) - 2 :]
        args[3] = 2
        last.args = tuple(args)
        last.meta["val"] = last.meta["val"].to(operand(last, 0).meta["val"].dtype)
    else:
        _in_float32(graph, last)
    return Units([c for c in counters if c is not None], tokens)


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
    """A field of the batch holds indices: `size` rows or classes, besides `ignored` (None: every index counts)."""

    field: str
    size: int
    ignored: int | None

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
            found.append(Limit(str(index.target), shape[0] if lookup else shape[min(1, len(shape) - 1)], ignored))
    return found


_RESHAPES = {"view", "reshape", "flatten", "contiguous", "slice", "to", "clone", "squeeze", "unsqueeze", "transpose"}


def _reduction(node: fx.Node) -> int:
    return int(node.args[3]) if len(node.args) > 3 else 1  # type: ignore[arg-type]


def _counter(graph: fx.Graph, loss: fx.Node) -> fx.GraphModule | None:
    """The number of targets of a cross entropy that count, from the batch's fields alone; None where it needs more."""
    target = operand(loss, 1)
    ignore = loss.args[4] if len(loss.args) > 4 else -100
    needed, stack = set(), [target]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    if any(n.op == "get_attr" for n in needed):
        return None
    new, env = fx.Graph(), {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            env[node] = new.node_copy(node, env.__getitem__)
    counted = new.call_function(operator.ne, (env[target], ignore))
    new.output(new.call_function(torch.sum, (counted,)))
    return fx.GraphModule(torch.nn.Module(), new)
