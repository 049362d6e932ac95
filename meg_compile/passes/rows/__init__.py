"""Does a loss treat the rows of a batch apart? Then it may be cut into micro-batches and replicas; else not."""

from meg_compile.passes.rows.constants import unclamped
from meg_compile.passes.rows.state import Part
from meg_compile.passes.rows.verdict import Verdict, judge

__all__ = ["Part", "Verdict", "judge", "unclamped"]
