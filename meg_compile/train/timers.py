"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("data", "forward_backward", "reduce", "optimizer", "checkpoint")


class Timers:
    """`with timers("data"): ...` adds to a phase of `PHASES`; `take()` gives the seconds of each and starts anew.

    A CPU's wall time costs nothing. A GPU works while Python runs ahead, so that there its own events are read: they
    are waited for in `take`, and only there. on: null for CPUs alone.
    """

    def __init__(self, device: torch.device, on: bool | None = None):
        self.device, self.on = device, device.type == "cpu" if on is None else on
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        assert phase in PHASES, phase
        started = self._mark()
        yield
        if self.on:
            self._spans[phase].append((started, self._mark()))

    def take(self) -> dict[str, float]:
        """Seconds of the phases that ran since the last call."""
        taken = {phase: sum(self._between(*span) for span in spans) for phase, spans in self._spans.items()}
        self._spans.clear()
        return taken

    def _mark(self) -> Any:
        if not self.on or self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000
