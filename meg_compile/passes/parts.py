"""A graph over whole sequences becomes one over a part of every sequence.

Operators that need no position but their own run on the part. What parameters and literals alone give (tables of
positions, masks) stays whole, and readers of the data take their part of it. How a part is taken and what attention
becomes is for the caller to say: a rank's share (`passes/context.py`), or the newest tokens (`passes/decode.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx
from torch.fx.node import map_arg

from meg_compile.axes.atoms import atoms, leaves
from meg_compile.axes.infer import Axes
from meg_compile.axes.layout import Layout
from meg_compile.axes.op import Op, each, how_to_add
from meg_compile.graph.nodes import attention_mask

Call = tuple[Any, tuple, dict]
"""(target, args, kwargs)."""


class Parts(NamedTuple):
    """bound:     the name of what says, when the graph runs, which part it is.
    part:      the call that takes it, for a whole value, bound, and for each of the value's dims the (size, is a
               sequence) of its axes.
    attention: the call for (op, bound, args, kwargs): attention of a part's queries over what they may see.
    dropout:   (op) -> one more argument for what draws a mask.
    """

    bound: str
    part: Callable[[fx.Node, fx.Node, list], Call]
    attention: Callable[[Op, fx.Node, tuple, dict], Call]
    dropout: Callable[[Op], Any] | None = None


def on_parts(graph: fx.Graph, axes: Axes, layout: Layout, how: Parts) -> fx.Graph:
    """layout: the sequences, of which a part is one of `layout.tp`."""
    new, env, taken = fx.Graph(), {}, {}
    bound = new.get_attr(how.bound)

    def read(node: fx.Node, reader: fx.Node) -> fx.Node:
        op = axes.ops[node]
        whole = axes.ops[reader].constant or (axes.ops[reader].attends is not None and node is attention_mask(reader))
        if not op.constant or whole or not layout.touches(each(op.out)):
            return env[node]
        if node not in taken:
            dims = [[(a.size, a in layout.sharded) for a in leaves(dim)] for dim in op.out]
            taken[node] = new.call_function(*how.part(env[node], bound, dims))
            taken[node].meta = _described(node, op, layout)
        return taken[node]

    for node in graph.nodes:
        op = axes.ops[node]
        target, args, kwargs = node.target, node.args, node.kwargs
        args, kwargs = map_arg((args, kwargs), lambda n, reader=node: read(n, reader))
        touched = node.op == "call_function" and not op.constant and layout.touches(op.shapes())
        if touched and op.attends is not None:
            target, args, kwargs = how.attention(op, bound, args, kwargs)
        elif touched and op.drawn is not None and how.dropout is not None:
            args = (*args, how.dropout(op))
        elif touched and op.localise is not None:
            target, args, kwargs = op.localise(layout.local, *args, **kwargs)
        env[node] = new.create_node(node.op, target, args, kwargs, node.name)
        env[node].meta = _described(node, op, layout)
        if op.constant:
            env[node].meta["layout"] = Layout(1, frozenset())
    return new


def _described(node: fx.Node, op: Op, layout: Layout) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "val") if key in node.meta}
    return kept | {"dims": op.out, "layout": layout}


def stands_in_the_way(op: Op, axes: Axes, layout: Layout) -> str | None:
    """Why an operator cannot run on parts of the sequence; None where it can."""
    if not layout.touches(op.shapes()):
        return None
    if not op.ruled:
        return f"has no rule, so it is taken to need the whole sequence; {how_to_add(op.name)}"
    if op.attends is not None:
        *inputs, _ = op.attends
        node = attention_mask(op.node)
        if node is not None and not axes.ops[node].constant:
            return "takes a mask that depends on the data"
        plain = all(len(leaves(x[-2])) == 1 and leaves(x[-2])[0] in layout.sharded for x in inputs)
        elsewhere = any(layout.holds(dim) for x in inputs for dim in (*x[:-2], x[-1]))
        return "does not run along the sequence alone" if elsewhere or not plain else None
    twice = [dims for dims in op.shapes() if sum(a in layout.sharded for dim in dims for a in atoms(dim)) > 1]
    if twice:
        return "relates positions to positions; torch's scaled_dot_product_attention is understood"
    if any(layout.holds(dim) for dim in (*op.needed, *op.summed)):
        return "needs the whole sequence"
    if any(not layout.touches([dims]) for dims in each(op.out)):
        return "gives a value without the sequence"
    return None


def arguments_of_attention(op: Op, args: tuple, kwargs: dict) -> tuple[tuple, list[Any]]:
    """((q, k, v, mask, is_causal, scale, enable_gqa), what it draws its dropout with) of either kind of attention."""
    if op.name == "exact_attention":
        return args[:7], list(args[7:])
    q, k, v, mask, _, causal = (*args, *(None, 0.0, False)[len(args) - 3 :])
    mask, causal = kwargs.get("attn_mask", mask), kwargs.get("is_causal", causal)
    return (q, k, v, mask, causal, kwargs.get("scale"), kwargs.get("enable_gqa", False)), []
