"""What can go wrong, one class per kind of mistake.

    MegError
    ├── Refused          the user's configuration, model or data cannot work: exit code 2
    │   └── CaptureError     the model cannot be captured as a graph
    ├── NotEqual         the compiled program is not the plain model: exit code 1
    ├── Hung             no rank got on any more: exit code 1
    ├── RankFailed       a worker process failed while it ran: exit code 1
    └── Exited           the user's code ended the process: exit code 1

A refusal carries every fault that was found, not only the first, and each fault names the key, its value,
what is wrong and what would work. Bugs of this package are plain `AssertionError`s, never a `MegError`.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class MegError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    key      what the user wrote it under, such as `plan.tp`, or the place in their model
    value    what stands there; None where a value would say nothing
    problem  what is wrong with it, a phrase without a full stop
    fix      what would work, an imperative phrase; empty where nothing would
    """

    key: str
    value: object
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        place = self.key if self.value is None else f"{self.key}={self.value}"
        return f"{place}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class Refused(MegError):
    """Input that cannot work, refused before any process starts. `faults` holds all that was found."""

    exit_code = 2
    heading = "This configuration cannot run"

    def __init__(self, faults: Fault | Iterable[Fault]):
        self.faults = (faults,) if isinstance(faults, Fault) else tuple(faults)
        assert self.faults, "a refusal names at least one fault"
        super().__init__(self.faults)

    def __str__(self) -> str:
        count = f" ({len(self.faults)} faults)" if len(self.faults) > 1 else ""
        return "\n".join([f"{self.heading}{count}:", *(f"  {fault}" for fault in self.faults)])


class CaptureError(Refused):
    """The model cannot be turned into a graph that computes the same thing."""

    heading = "This model cannot be captured"


class NotEqual(MegError):
    """The compiled program does not compute what the plain model computes."""


class Hung(MegError):
    """No rank made progress for too long."""


class RankFailed(MegError):
    """A worker failed: `rank` is its global rank, `text` its traceback. comes_again: whether it would once
    more, if no step was taken before."""

    def __init__(self, rank: int, text: str, comes_again: bool = False):
        super().__init__(rank, text, comes_again)
        self.rank, self.text, self.comes_again = rank, text, comes_again

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.text}"


class Exited(MegError):
    """Code of the model, its loss or its data ended the process, as by sys.exit()."""

    def __init__(self, stop: SystemExit):
        frame = [f for f in traceback.extract_tb(stop.__traceback__) if not f.filename.startswith("<")][-1]
        code = "" if stop.code is None else repr(stop.code)
        super().__init__(f"{frame.filename}:{frame.lineno} called exit({code}); raise an error there instead")


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that `word` is most likely a misspelling of, or None where none comes close."""
    return next(iter(difflib.get_close_matches(word, list(options), n=1)), None)


def any_of(words: Sequence[str]) -> str:
    """Some choices as a phrase: "2, 4 or 8"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
