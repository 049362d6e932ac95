"""One worker process: `python -m meg_compile.runtime.worker MODULE:FUNCTION RUN_DIR` calls FUNCTION(RUN_DIR).

Before anything heavy is imported the process arranges where its output goes and how it ends: ranks other than 0 write
to `RUN_DIR/logs/rank_N.log`; Ctrl-C ends it at once; it does not outlive the process that started it.
"""

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main(entry: str, run_dir: Path) -> int:
    """The exit code: 0, or 1 after an exception that `record` has written down for the parent to show.

    A failed process ends without tearing anything down, so that its peers notice at once.
    """
    rank = int(os.environ["RANK"])
    if rank:
        log = os.open(run_dir / "logs" / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()

    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_call)(entry, run_dir)
    except Exception:
        if rank:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    return 0


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """This process does not outlive the one that started it, however that one ends (on Linux): it gets this signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _call(entry: str, run_dir: Path) -> None:
    import importlib

    from meg_compile.errors import Exited

    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(run_dir)
    except SystemExit as stop:
        raise Exited(stop) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
