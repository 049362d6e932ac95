"""What each ATen operator says about the axes of its operands; one small file per family."""

from meg_compile.axes.rules import contraction, elementwise, pieces, positional, source, view, vocabulary

__all__ = ["contraction", "elementwise", "pieces", "positional", "source", "view", "vocabulary"]
