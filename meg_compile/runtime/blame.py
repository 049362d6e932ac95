"""Which of several failed ranks failed first, and what to say about it.

When one rank dies its peers soon fail too, in the middle of a collective, often within the same second. So a lost
connection is only blamed where nothing else went wrong, and ranks that the launcher itself stopped never are.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meg_compile.errors import RankFailed

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|recv.*failed|NCCL.*remote"
    r"|connectFullMesh|Timed out waiting|timed out after|failed to recv",
    re.IGNORECASE,
)
OURS = re.compile(r"\A(?:.*\n)?meg_compile\.errors\.(\w+): (.*)\Z", re.DOTALL)
"""The end of a traceback of an error that we raised on purpose, which needs no traceback."""
COMES_AGAIN = ("Refused", "CaptureError", "NotEqual")
"""Errors of ours that end every attempt alike, where they come before the first step."""
LOG_LINES = 15


def first_failure(failures: Mapping[int, ProcessFailure], log_dir: Path) -> RankFailed:
    """The rank that failed first, and its traceback, or how it ended and the end of its log.

    Of a `MegError` only what it says.

    failures  by global rank, as torch's elastic launcher reports them
    log_dir   holds `rank_N.log` of every rank but 0, whose output went to the console
    """
    rank = min(failures, key=lambda r: _order(failures[r]))
    failure = failures[rank]
    text = _traceback(failure)
    said = OURS.search(text or "")
    comes_again = said is not None and said[1] in COMES_AGAIN
    return RankFailed(rank, said[2].strip() if said else text or _ending(rank, failure, log_dir), comes_again)


def _order(failure: ProcessFailure) -> tuple[int, float]:
    """Causes before consequences, then by time."""
    text = _traceback(failure)
    if text is None:
        return (3 if failure.exitcode == -signal.SIGTERM else 1), float(failure.timestamp)
    return (2 if LOST_PEER.search(text) else 0), os.stat(failure.error_file).st_mtime


def _traceback(failure: ProcessFailure) -> str | None:
    """What `record` wrote before the process ended; None where it did not get that far."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return None
    return message.get("extraInfo", {}).get("py_callstack") or message.get("message")


def _ending(rank: int, failure: ProcessFailure, log_dir: Path) -> str:
    if failure.exitcode < 0:
        hint = " (often the system, out of memory)" if failure.exitcode == -signal.SIGKILL else ""
        how = f"it was killed by signal {-failure.exitcode}, {failure.signal_name()}{hint}"
    else:
        how = f"it ended with exit code {failure.exitcode} and no exception"
    log = log_dir / f"rank_{rank}.log"
    if rank == 0 or not log.is_file():
        return how
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([how, f"the end of {log}:", *(f"  {line}" for line in lines)]) if lines else how
