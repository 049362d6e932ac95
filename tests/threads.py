"""Ranks as threads, which the zoo's table uses too."""

from benchmarks.threads import run_threads

__all__ = ["run_threads"]
