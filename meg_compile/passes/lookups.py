"""Indices that are known before any data is: positions, which must have rows in their table."""

from __future__ import annotations

from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured
from meg_compile.graph.nodes import base_name, in_source, operand
from meg_compile.passes.values import ValueOf, find_value


def check_lookups(captured: Captured, value_of: ValueOf) -> None:
    """Refused for an embedding of constant indices that go beyond its table, as those of rows too long do."""
    for node in captured.graph.nodes:
        if node.op != "call_function" or base_name(node.target) != "embedding":
            continue
        table, index = operand(node, 0), operand(node, 1)
        found = find_value(captured, index, value_of)
        size = table.meta["val"].shape[0]
        if found is None or not found.numel() or -1 < int(found.min()) <= int(found.max()) < size:
            continue
        worst = int(found.max()) if int(found.max()) >= size else int(found.min())
        name = f" {table.target}" if table.op == "get_attr" else ""
        problem = (
            f"rows of {found.shape[-1]} look up {worst}{in_source(node)} in the model's table{name}, of {size} rows"
        )
        fix = "use shorter rows (data.seq_len, or prompts and generate.tokens), or a model for longer ones"
        raise Refused(Fault("model", None, problem, fix))
