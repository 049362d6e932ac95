"""Ranks as threads, which the zoo's table uses too."""

from benchmarks.threads import run_threads, threaded

__all__ = ["run_threads", "threaded"]
