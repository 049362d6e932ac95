"""Proof that a compiled program computes what the plain model computes."""

from meg_compile.verify.compare import verify
from meg_compile.verify.dropout import DropoutExact, DropoutOff
from meg_compile.verify.report import Difference, Report

__all__ = ["Difference", "DropoutExact", "DropoutOff", "Report", "verify"]
