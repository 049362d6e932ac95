"""A graph as the body of a Python function."""

from __future__ import annotations

import builtins
import inspect
import keyword
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from meg_compile.eject.expression import Expressions, literal
from meg_compile.explain.text import describe
from meg_compile.graph.nodes import BOUND, CP, TP, source_line
from meg_compile.ops.context import context_attention
from meg_compile.ops.counted import exact_attention, exact_dropout

WIDTH = 120
OURS = {"self", "torch", "F", "i", "site", "others", "checkpoint"}
RESERVED = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *OURS}
SITE_AT = {exact_dropout: 3, exact_attention: 9, context_attention: 10}
"""Where the number of a dropout stands among its arguments."""
SHORT = {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "loss", "vocab_cross_entropy": "loss"}
SHORT |= {"split_with_sizes": "split", "exact_dropout": "dropout", "exact_attention": "attention"}
SHORT |= {"context_attention": "attention"}
UNPACKED = 8  # parts of a value that are given names of their own


class Body:
    """The lines of a function, and which operators of `meg_compile.ops` they call.

    tensor: how a parameter or buffer is written. cp: sequences are shared out. first_site: the number of the first
    dropout, where others are counted from it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        expressions: Expressions,
        tensor: Callable[[str], str],
        cp: bool = False,
        first_site: int | None = None,
    ):
        self.graph, self.expressions, self.tensor = graph, expressions, tensor
        self.cp, self.first_site = cp, first_site
        self.names: dict[fx.Node, str] = {}
        self.wanted: dict[fx.Node, str] = {}
        self.taken = {*RESERVED, *(getattr(node.target, "__name__", "") for node in graph.nodes)}
        self.operators: set[tuple[str, str]] = set()
        self.rows: list[tuple[str, str]] = []
        self.where = ""

    def name(self, node: fx.Node, wanted: str) -> str:
        """A name of its own for a value."""
        base = re.sub(r"\W", "_", wanted).strip("_").lower() or "x"
        base = f"x_{base}" if base[0].isdigit() else base
        found, i = base, 0
        while found in self.taken:
            i += 1
            found = f"{base}_{i}"
        self.taken.add(found)
        self.names[node] = found
        return found

    def keep(self, node: fx.Node) -> None:
        """Call a field of the batch as the batch does."""
        self.names[node] = str(node.target)
        self.taken.add(str(node.target))

    def spell(self, value: Any) -> str:
        return literal(value, self._operand)

    def _operand(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return {TP: "self.tp", CP: "self.cp"}.get(str(node.target)) or self.tensor(str(node.target))
        return self.names[node]

    def add(self, node: fx.Node) -> None:
        """Write one operator, under the line of the user's source that it comes from."""
        if node.op != "call_function" or node in self.names:
            return
        self._say_where(node)
        code = self._expression(node)
        if parts := _parts(node):
            targets = [self._part(parts.get(i), node, i) for i in range(max(parts) + 1)]
            num = len(node.meta["val"])
            targets += ["*_"] if num > len(targets) + 1 else ["_"] * (num - len(targets))
            comma = "," if len(targets) == 1 else ""
            self.rows.append((f"{', '.join(targets)}{comma} = {code}", describe(next(iter(parts.values()))[0])))
            return
        self.rows.append((f"{self.name(node, self._base(node))} = {code}", describe(node)))

    def line(self, code: str, comment: str = "") -> None:
        self.rows.append((code, comment))

    def text(self, indent: int) -> str:
        """The lines, with comments in one column as far as they fit."""
        space = " " * indent
        room = WIDTH - indent
        sizes = [
            (len(code), room - len(comment) - 2) for code, comment in self.rows if comment and not code.startswith("#")
        ]
        fitting = [size for size in sizes if size[0] + 2 <= size[1]]
        column = max((c for c, _ in fitting if all(last >= c + 2 for size, last in fitting if size <= c)), default=0)
        lines = []
        for code, comment in self.rows:
            if code.startswith("#") or not code:
                lines.append(code if len(code) <= room else f"{code[: room - 4]} ...")
                continue
            if not comment or len(code) + len(comment) + 4 > room:
                lines += [f"# {comment}"[:room]] if comment else []
                lines += wrap(code, room)
                continue
            lines.append(f"{code:<{column}}  # {comment}")
        return "\n".join((space + line).rstrip() for line in lines) + "\n"

    def _say_where(self, node: fx.Node) -> None:
        where = source_line(node)
        if where and where != self.where:
            self.where = where
            if self.rows and self.rows[-1][0]:
                self.rows.append(("", ""))
            self.rows.append((f"# {where}: {_source_text(node)}".rstrip(": "), ""))

    def _part(self, readers: list[fx.Node] | None, node: fx.Node, i: int) -> str:
        if not readers:
            return "_"
        found = self.name(readers[0], f"{self._base(node)}_{i}")
        for other in readers[1:]:
            self.names[other] = found
        return found

    def _base(self, node: fx.Node) -> str:
        """What a value is called: as is `wanted`, after the module whose weight it reads, or after its operator."""
        if node in self.wanted:
            return self.wanted[node]
        operand = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        op = getattr(node.target, "__name__", "")
        before = self.names.get(operand, "") if operand is not None else ""
        if op in ("copy_to_tp", "gather_to_tp"):
            return f"f_{before}"
        if op in ("reduce_from_tp", "scatter_from_tp"):
            return f"g_{before}"
        if op in ("gather_sequence", "cut_sequence", "part_of", "context_part"):
            return f"{'all' if op == 'gather_sequence' else 'part'}_{before}"
        if node.name.endswith("_biased") and before.startswith("g_"):
            return f"{before[2:]}_biased"
        *_, called = (node.meta.get("nn_module_stack") or {"": ("", "")}).values()
        if _says(called[1]).startswith("torch.nn.") and not called[0].rpartition(".")[2].isdigit():
            return called[0].rpartition(".")[2]
        read = [str(n.target).split(".") for n in node.all_input_nodes if n.op == "get_attr" and n.target not in BOUND]
        if read and len(read[0]) > 1 and read[0][-1] == "weight" and not read[0][-2].isdigit():
            return read[0][-2]
        name = getattr(node.target, "_opname", op).strip("_")
        return SHORT.get(name, name)

    def _expression(self, node: fx.Node) -> str:
        module = getattr(node.target, "__module__", "") or ""
        if not module.startswith("meg_compile.ops."):
            return self.expressions.write(node, self.spell)
        called = node.target.__name__  # type: ignore[union-attr]
        self.operators.add((module, called))
        args = list(node.args)
        if not self.cp and isinstance(args[-1], fx.Node) and args[-1].target == CP:
            args.pop()
        parameters = list(inspect.signature(node.target).parameters.values())  # type: ignore[arg-type]
        said = [self.spell(arg) for arg in args]
        if (at := _site_at(node)) is not None and self.first_site is not None:
            offset = int(node.args[at]) - self.first_site  # type: ignore[arg-type]
            said[at] = f"site + {offset}" if offset else "site"
        named = {p.name: text for p, text in zip(parameters, said, strict=False) if p.default is not p.empty}
        if named and len(args) <= len(parameters):
            said = said[: len(parameters) - sum(p.default is not p.empty for p in parameters)]
            same = {
                p.name
                for p, arg in zip(parameters, args, strict=False)
                if type(arg) is type(p.default) and arg == p.default
            }
            said += [f"{name}={text}" for name, text in named.items() if name not in same]
        said += [f"{key}={self.spell(value)}" for key, value in node.kwargs.items()]
        return f"{called}({', '.join(said)})"


def wrap(code: str, room: int) -> list[str]:
    """A line as several where it is too long: the arguments of its call on lines of their own."""
    if len(code) <= room:
        return [code]
    start = code.find("(")
    if start < 0 or not code.endswith(")"):
        return [code]
    args = _split(code[start + 1 : -1])
    if len(args) < 2 and len(code) - start > room:
        return [code]
    inside = ", ".join(args)
    if len(inside) + 5 <= room:
        return [code[: start + 1], f"    {inside}" + ("," if len(args) == 1 else ""), ")"]
    return [code[: start + 1], *(f"    {line}" for arg in args for line in wrap(f"{arg},", room - 4)), ")"]


def _split(text: str) -> list[str]:
    """The arguments of a call."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def sites(nodes: Iterable[fx.Node]) -> list[int]:
    """The numbers of the dropouts among some nodes."""
    return [int(n.args[at]) for n in nodes if (at := _site_at(n)) is not None]  # type: ignore[arg-type]


def _site_at(node: fx.Node) -> int | None:
    at = SITE_AT.get(node.target)  # type: ignore[arg-type]
    return at if at is not None and at < len(node.args) else None


def _parts(node: fx.Node) -> dict[int, list[fx.Node]]:
    """The readers of each part of a value of several tensors, where parts are all that is read of it; else empty."""
    found: dict[int, list[fx.Node]] = {}
    if not isinstance(node.meta.get("val"), (list, tuple)) or len(node.meta["val"]) > UNPACKED:
        return {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[0] is not node:
            return {}
        found.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    return found


def _says(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _source_text(node: fx.Node) -> str:
    """The text of that line, as far as the trace of the capture holds it."""
    found = re.findall(r'File "([^"]+)", line \d+[^\n]*\n([^\n]*)', node.meta.get("stack_trace") or "")
    own = [text.strip() for file, text in found if "/torch/" not in file and not file.endswith("graph/capture.py")]
    return own[-1] if own and not own[-1].startswith("File ") else ""
