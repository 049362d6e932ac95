"""Plain YAML values against type annotations.

Numbers are numbers: `1e-4` in quotes is a number, a whole number is a fraction too where one is asked for, and
true/false never counts as 0 or 1.
"""

from __future__ import annotations

import types
import typing
from typing import Any

WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
UNIONS = (types.UnionType, typing.Union)  # what `int | None` and `Literal[...] | None` are
GIVEN = {
    str: "text",
    bool: "true/false",
    int: "a whole number",
    float: "a fraction",
    type(None): "null",
    list: "a list",
}


class Mismatch(Exception):
    """A value that is not what is asked for. str(): what would be."""


def kind(value: Any) -> str:
    """What a plain value is called in a message."""
    return GIVEN.get(type(value), "a section")


def describe(hint: Any) -> str:
    """What an annotation asks for, in words."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list of {describe(typing.get_args(hint)[0]).removeprefix('a ')}s"
    if typing.get_origin(hint) is dict:
        if typing.get_args(hint)[1] is Any:
            return "a mapping"
        return f"a mapping from names to {describe(typing.get_args(hint)[1]).removeprefix('a ')}s"
    if typing.get_origin(hint) in UNIONS:
        return " or ".join(describe(one) for one in typing.get_args(hint))
    return "null" if hint in (None, type(None)) else "a value" if hint is Any else WANTED[hint]


def is_simple(hint: Any) -> bool:
    """Whether `convert` knows the annotation."""
    if typing.get_origin(hint) in UNIONS:
        return all(is_simple(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return all(map(is_simple, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return is_simple(typing.get_args(hint)[0])
    return hint in WANTED or hint in (None, type(None)) or typing.get_origin(hint) is typing.Literal


def convert(value: Any, hint: Any) -> Any:
    """The value in the annotated type, or `Mismatch`."""
    if hint is Any:
        return value
    if typing.get_origin(hint) in UNIONS:
        if value is None and type(None) in typing.get_args(hint):
            return None
        for one in (one for one in typing.get_args(hint) if one is not type(None)):
            try:
                return convert(value, one)
            except Mismatch:
                continue
        raise Mismatch(describe(hint))
    if typing.get_origin(hint) is list:
        if not isinstance(value, list):
            raise Mismatch(describe(hint))
        return [convert(item, typing.get_args(hint)[0]) for item in value]
    if typing.get_origin(hint) is dict:
        of_key, of_value = typing.get_args(hint)
        try:
            return {convert(key, of_key): convert(item, of_value) for key, item in value.items()}
        except (AttributeError, Mismatch):
            raise Mismatch(describe(hint)) from None
    if typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        raise Mismatch(describe(hint))
    if hint is Any:
        return value
    if hint in (int, float):
        return _number(value, hint)
    if type(value) is hint:
        return value
    raise Mismatch(describe(hint))


def _number(value: Any, hint: type) -> Any:
    if type(value) is hint or (hint is float and type(value) is int):
        return hint(value)
    if isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            pass
    raise Mismatch(describe(hint))
