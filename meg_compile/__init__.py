"""Compile a plain PyTorch model for Megatron-style parallel training."""

from meg_compile.axes.op import rule
from meg_compile.compiler import compile
from meg_compile.errors import CaptureError, Fault, MegError, RankFailed, Refused
from meg_compile.plan import Plan
from meg_compile.program import Program

__all__ = ["CaptureError", "Fault", "MegError", "Plan", "Program", "RankFailed", "Refused", "compile", "rule"]
