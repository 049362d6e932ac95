"""What every setting means, from the docstrings of the schema."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from meg_compile.config.schema import Config
from meg_compile.config.targets import Target


def describe_settings() -> str:
    """Every key of the configuration with the line that the schema says about it."""
    return "What the settings mean:\n\n" + "\n".join(_lines(Config, "")) + "\n"


def _lines(schema: Any, prefix: str) -> list[str]:
    hints, lines = get_type_hints(schema), []
    for name, text in docstrings(schema).items():
        lines.append(f"  {prefix + name:<26} {text}")
        if is_dataclass(hints[name]) and hints[name] is not Target:
            lines += _lines(hints[name], f"{prefix}{name}.")
    return lines


def docstrings(schema: type) -> dict[str, str]:
    """field -> the docstring below it, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found
