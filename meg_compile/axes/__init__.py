"""Logical axes of a captured graph; what a rule for one's own operator needs is named here."""

from meg_compile.axes.atoms import Dims, unify
from meg_compile.axes.op import Op, rule
from meg_compile.axes.rules.elementwise import broadcast

__all__ = ["Dims", "Op", "broadcast", "rule", "unify"]
