"""Signals that ask a run to stop: its current step is finished, a checkpoint saved, and every rank leaves at the same
step."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from meg_compile.runtime.worker import end_with_parent


class Stop:
    """A context in which SIGTERM, and the `warning` signal by its name, only leave a mark. Outside the main thread it
    changes nothing.

    asked: by number, the signals that ask, and whether this process has got them.
    """

    def __init__(self, warning: str | None = None):
        numbers = [signal.SIGTERM] + ([signal.Signals[warning]] if warning else [])
        self.asked = dict.fromkeys(map(int, numbers), False)

    def __enter__(self) -> Stop:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._mark) for number in self.asked}
            end_with_parent(signal.SIGKILL)  # as before, SIGTERM would only be marked
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.before:
            end_with_parent()

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self.asked[number] = True
