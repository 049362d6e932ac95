"""Local worker processes, started through torch's elastic launcher, talking over loopback only.

Rank 0 writes to the console of whoever started the run, every other rank to `RUN_DIR/logs/rank_N.log`. When a rank
fails the others are stopped, and the failure that came first is raised as `RankFailed`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meg_compile.runtime.blame import first_failure

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
STOP_SECONDS = 10
SAVE_SECONDS = 3600


def launch(
    entry: str,
    nproc: int,
    run_dir: Path,
    device: str,
    threads: int | None = None,
    *,
    saves: bool = False,
    warning: str | None = None,
    again: bool = False,
) -> None:
    """Runs `entry` on `nproc` processes and waits for them.

    entry    "module:function"; each process calls function(run_dir) with RANK and the like in its environment
    device   "cuda" gives nccl the loopback interface too
    threads  CPU threads per process; None shares the cores out evenly
    saves    they save before they end when they are told to stop, and are given the time for it
    warning  the name of another signal that tells them to stop
    again    the logs of an attempt before this one stay

    RankFailed: a process failed; all of them have ended by then. KeyboardInterrupt: we were told to stop, by the
    signal in its argument; all of them have ended too.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in () if again else logs.iterdir():
        old.unlink()
    with (
        tempfile.TemporaryDirectory(prefix="meg_compile_") as scratch,
        _environment(_worker_env(nproc, device, threads, SAVE_SECONDS if saves else STOP_SECONDS)),
        _agent_log(logs / "launcher.log"),
        _own_signal_handlers([*SIGNALS, warning] if warning else SIGNALS) as handled,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            run_id="local",
            rdzv_backend=LoopbackRendezvous.name,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=LOOPBACK,
            signals_to_handle=",".join(handled),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "meg_compile.runtime.worker", entry, str(run_dir))
        except ChildFailedError as error:
            raise first_failure(error.failures, logs) from None
        except SignalException as error:
            raise KeyboardInterrupt(int(error.sigval)) from None


class LoopbackRendezvous(RendezvousHandler):
    """One node that meets itself. Its store, which the workers use too, listens on loopback only.

    torch's own rendezvous back ends bind their store to every interface.
    """

    name = "meg_compile_loopback"

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return self.name

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((LOOPBACK, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


rendezvous_handler_registry.register(LoopbackRendezvous.name, LoopbackRendezvous)


def _worker_env(nproc: int, device: str, threads: int | None, stop_s: int = STOP_SECONDS) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": str(threads or max(1, num_cores() // nproc)),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "TP_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(stop_s),
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "PYTHONUNBUFFERED": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: large logits fault less often
    }
    return env | ({"NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE} if device == "cuda" else {})


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _agent_log(path: Path) -> Iterator[None]:
    """What the elastic agent says goes to a file: its summary of a failure holds nothing that we do not say."""
    logger, handler = logging.getLogger("torch.distributed.elastic"), logging.FileHandler(path, delay=True)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()


@contextmanager
def _own_signal_handlers(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The agent replaces the handlers of these signals; ours come back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.Signals[name] for name in names)}
    try:
        yield names
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
