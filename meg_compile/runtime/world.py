"""The processes that torchrun started, and which device each rank computes on."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.elastic.multiprocessing.errors import record

from meg_compile.errors import Exited, MegError
from meg_compile.runtime.blame import LOST_PEER
from meg_compile.runtime.worker import end_with_parent

LATE_SECONDS, LOOK_SECONDS = 5, 0.02
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_TO_MEET = timedelta(minutes=5)
PATIENCE_TO_HEAR = timedelta(hours=1)
NO_LIMIT = timedelta(days=20)  # whose milliseconds fit into 31 bits
RUN_KEY = "meg_compile/run"


@dataclass(frozen=True)
class World:
    """This process among those of a run. `store` is the one that the launcher hosts (or rank 0, without a launcher)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    store: dist.Store

    def publish(self, run: Mapping[str, Any] | None) -> None:
        """Rank 0 tells the others what to run; None: nothing, for the run is refused."""
        self.store.set(RUN_KEY, json.dumps(run))

    def hear(self) -> Any:
        """What rank 0 published; waits for it."""
        self.store.wait([RUN_KEY], PATIENCE_TO_HEAR)
        return json.loads(self.store.get(RUN_KEY))

    def init_process_group(self, device: torch.device) -> None:
        """gloo for tensors on the CPU, and nccl too for those on GPUs."""
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Of this group and of all that are made later; `Watch` ends what hangs.
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = NO_LIMIT
        store = dist.PrefixStore("meg_compile/groups", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)


def started_by_torchrun() -> bool:
    """Whether this process is one of several that somebody else started."""
    return all(os.environ.get(name) for name in TORCHRUN_VARIABLES)


def join() -> World:
    """Meets the other processes, by what torchrun (or `launch`) left in the environment."""
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=PATIENCE_TO_MEET)))
    local_rank = int(os.environ["LOCAL_RANK"])
    store = dist.PrefixStore(attempt_name(store, rank, size), store)
    return World(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE") or size), store)


def attempt_name(store: dist.Store, rank: int, size: int) -> str:
    """A name that the processes of this attempt have in common, and those of none before.

    torchrun keeps the store when it starts processes again, with all that is in it, and counts attempts on each machine
    for itself. So every rank asks rank 0 by a name that it has just made up, until all have heard.
    """
    mine = f"attempt_{secrets.token_hex(8)}"
    if rank:
        store.set(f"asks_{rank}", mine)
        name = store.get(f"{mine}_belongs_to").decode()
        store.set(f"{name}_heard_{rank}", "")
        return name
    unheard, deadline = set(range(1, size)), time.monotonic() + PATIENCE_TO_MEET.total_seconds()
    while unheard:
        for other in sorted(unheard):
            if store.check([f"{mine}_heard_{other}"]):
                unheard.discard(other)
            elif store.check([f"asks_{other}"]):
                store.set(f"{store.get(f'asks_{other}').decode()}_belongs_to", mine)
        if time.monotonic() > deadline:
            raise MegError(f"ranks {', '.join(map(str, sorted(unheard)))} have not come in {PATIENCE_TO_MEET}")
        time.sleep(LOOK_SECONDS)
    return mine


def under_torchrun(function: Callable[..., int], *args: Any) -> int:
    """function(*args), with what it raises left to torchrun, which shows the first failure of all ranks.

    A rank that fails because another one is gone holds back for a moment, so that the other one is the first.
    """

    def late() -> int:
        try:
            return function(*args)
        except SystemExit as stop:
            raise Exited(stop) from None
        except Exception:
            if LOST_PEER.search(traceback.format_exc()):
                time.sleep(LATE_SECONDS)
            raise

    end_with_parent()
    try:
        return record(late)() or 0
    except Exception:
        sys.stdout.flush()
        os._exit(1)


def device_type(asked: str, num_local: int) -> str:
    """cpu or cuda for `launch.device`: "auto" is cuda where each of the local ranks has a GPU of its own."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.device_count() >= num_local else "cpu"
