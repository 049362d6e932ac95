"""Whether a model shifts its labels itself, as causal language models of transformers do."""

from __future__ import annotations

from torch import fx

from meg_compile.graph.nodes import base_name

_KEEPS = {"to", "_to_copy", "pad", "constant_pad_nd", "clone", "contiguous", "detach", "alias", "where", "masked_fill"}


def shifts_labels(graph: fx.Graph) -> bool:
    """Whether a graph compares each position with the label of a later one: it cuts off the first labels of a row."""
    seen: set[fx.Node] = set()
    stack = [node for node in graph.nodes if node.op == "placeholder" and node.target == "labels"]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            name, last = base_name(user.target), node.meta["val"].dim() - 1
            if name == "slice" and (user.args[1:2] or (0,))[0] in (-1, last) and last > 0:
                if len(user.args) > 2 and user.args[2]:
                    return True
            elif name in _KEEPS:
                stack.append(user)
    return False
