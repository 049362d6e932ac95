"""Pipeline layouts by hand, in Megatron-LM's letters: "Et*3|(tt|)*2,L".

E is all that comes before the first block, t a block, L all that comes after the last one with the loss; | ends a
stage. *n repeats the letter or the group in brackets before it; commas and blanks mean nothing.
"""

from __future__ import annotations

import re


class BadLayout(ValueError):
    """A layout that says nothing: (what is wrong with it, what would work)."""

    def __init__(self, problem: str, fix: str):
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix


def read_layout(text: str) -> list[str]:
    """The letters of every stage in order: "E|t*2|(t|)*2L" -> ["E", "tt", "t", "t", "L"]. BadLayout for no layout."""
    groups: list[list[str]] = [[]]
    for token in re.findall(r"\*\d+|[^,\s]", text):
        if token == "(":
            groups.append([])
        elif token == ")":
            if len(groups) == 1:
                raise BadLayout("a bracket is closed that was not opened", "write groups as (tt|)*2")
            inside = "".join(groups.pop())
            groups[-1].append(inside)
        elif token[0] == "*":
            if not groups[-1] or token == "*":
                raise BadLayout("* repeats nothing, or not so many times", "write it as t*3 or (tt|)*2")
            groups[-1][-1] *= int(token[1:])
        elif token in "EtL|":
            groups[-1].append(token)
        elif token == "m":
            raise BadLayout("m, multi-token prediction, is not available", "leave it out")
        else:
            raise BadLayout(f"{token!r} is no letter of a layout", "use E, t, L, |, brackets and *n")
    if len(groups) > 1:
        raise BadLayout("a bracket is not closed", "write groups as (tt|)*2")
    letters = "".join(groups[0])
    if not letters.startswith("E") or letters.count("E") > 1:
        raise BadLayout("it must start with E, the embedding, and have no other", "write it as Et|tL, say")
    if not letters.endswith("L") or letters.count("L") > 1:
        raise BadLayout("it must end with L, the loss side, and have no other", "write it as Et|tL, say")
    return letters.split("|")
