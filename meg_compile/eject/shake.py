"""The operators of `meg_compile.ops` that a program uses, as files that need nothing else: what they do not reach is
left out, and all else is as it stands there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "meg_compile.ops."
WIDTH = 120


def write_operators(folder: Path, roots: Iterable[tuple[str, str]]) -> None:
    """Writes folder/MODULE.py for every module that is reached.

    roots: (module, name) of the operators that are used.
    """
    modules: dict[str, _Module] = {}
    stack = list(roots)
    while stack:
        name, wanted = stack.pop()
        module = modules.setdefault(name, _Module(name))
        stack += module.keep(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in modules.items():
        (folder / f"{name.removeprefix(PACKAGE)}.py").write_text(local(module.source()), encoding="utf-8")


def local(source: str) -> str:
    """Source of this package as source beside the files that are written."""
    source = source.replace("meg_compile.eject.runner.", "").replace(PACKAGE, "ops.")
    return source.replace("meg_compile::", "ejected::")


class _Module:
    def __init__(self, name: str):
        self.text = inspect.getsource(importlib.import_module(name))
        self.lines = self.text.splitlines()
        self.body = ast.parse(self.text).body
        self.defined: dict[str, list[int]] = {}
        self.imported: dict[str, str] = {}
        self.kept: set[int] = set()
        self.used: set[str] = set()
        for i, statement in enumerate(self.body):
            for one in _defines(statement):
                self.defined.setdefault(one, []).append(i)
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(PACKAGE):
                self.imported |= {alias.asname or alias.name: str(statement.module) for alias in statement.names}

    def keep(self, name: str) -> list[tuple[str, str]]:
        """Keep a definition and all that it reaches here; what it reaches in other modules."""
        elsewhere, stack = [], [name]
        while stack:
            one = stack.pop()
            if one in self.imported:
                elsewhere.append((self.imported[one], one))
            for i in self.defined.get(one, ()):
                if i not in self.kept:
                    self.kept.add(i)
                    found = _names(self.body[i])
                    self.used |= found
                    stack += found - {one}
        return elsewhere

    def source(self) -> str:
        parts = [self._docstring()]
        parts += self._imports()
        end = 0
        for i, statement in enumerate(self.body):
            start, last = end, statement.end_lineno or 0
            end = last
            if i in self.kept:
                parts.append("\n".join(self.lines[start:last]))
                if i == min(self.kept) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    parts[-1] = parts[-1].lstrip("\n")
            elif self._follows(i):
                parts[-1] += "\n" + "\n".join(self.lines[start:last])
        return re.sub(r"\n{4,}", "\n\n\n", "\n".join(parts).strip() + "\n")

    def _follows(self, i: int) -> bool:
        """The docstring of an assignment that is kept."""
        one = self.body[i]
        return i - 1 in self.kept and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)

    def _docstring(self) -> str:
        first = self.body[0]
        return "\n".join(self.lines[: first.end_lineno])

    def _imports(self) -> list[str]:
        lines = [""]
        groups: list[list[str]] = [[], [], [], []]
        for statement in self.body:
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            names = [a for a in statement.names if (a.asname or a.name.split(".")[0]) in self.used]
            module = statement.module if isinstance(statement, ast.ImportFrom) else ""
            if module == "__future__":
                groups[0].append("from __future__ import annotations")
                continue
            if not names:
                continue
            said = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in names)
            line = f"from {module} import {said}" if module else f"import {said}"
            assert len(line) <= WIDTH, line
            top = (module or names[0].name).split(".")[0]
            groups[3 if top == "meg_compile" else 2 if top == "torch" else 1].append(line)
        for group in groups:
            lines += [*group, ""] if group else []
        return lines


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        if statement.name != "_":
            return [statement.name]
        return [ast.unparse(decorator).split(".")[0] for decorator in statement.decorator_list]
    if isinstance(statement, ast.Assign):
        return [n.id for target in statement.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
