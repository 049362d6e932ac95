"""A run in which no rank makes progress any more ends, with every rank's Python stack.

A rank that waits for another one cannot tell a hang from a peer that is slow. So a rank says when it gets on
(`progress`: with a stage's micro-batch, a row of data, a block of a checkpoint's file, ...), and what counts is the
time since any rank of the run did. Process groups have no time limit of their own then.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from meg_compile.errors import Hung

LOOKS = 20  # in the time of patience
LONGEST_PAUSE_SECONDS = 5.0
LOOK_SECONDS, ANSWER_SECONDS, HOLD_BACK_SECONDS = 0.1, 5, 2
TORCH, STANDARD = os.path.dirname(torch.__file__), sysconfig.get_path("stdlib")
DISTRIBUTED = os.path.join(TORCH, "distributed")
MOST_PLACES = 8

_made = 0


def progress() -> None:
    """This rank got on; from any thread."""
    global _made
    _made += 1


class Watch:
    """A context around a rank's work, of which a thread looks after the run.

    When no rank has made progress for `timeout` seconds, each writes its stacks to `logs/rank_N.stack`; the ranks that
    did not answer or are in no collective are named in a `Hung`, which is left for the launcher to show, and the
    process ends.

    store    of the run
    timeout  None watches nothing
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float | None, run_dir: Path):
        self.rank, self.size, self.timeout, self.logs = rank, size, timeout, run_dir / "logs"
        self._store = store
        self._over = threading.Event()
        self._main = threading.main_thread().ident

    def __enter__(self) -> Watch:
        if self.timeout is not None:
            # A store answers one call at a time, and the main thread may wait in it.
            store = dist.PrefixStore("watch", self._store.clone())  # type: ignore[attr-defined]
            threading.Thread(target=self._look, args=(store, self.timeout), name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _look(self, store: dist.Store, timeout: float) -> None:
        # Pauses are counted, not time: a process that was suspended has not been waiting.
        pause = min(timeout / LOOKS, LONGEST_PAUSE_SECONDS)
        seen, of_all, idle_s = -1, -1, 0.0
        try:
            while not self._over.wait(pause):
                made, seen = _made != seen, _made
                now = store.add("progress", int(made))
                idle_s, of_all = (idle_s + pause, of_all) if now == of_all else (0.0, now)
                if idle_s >= timeout:
                    self._end(store, timeout)
        except dist.DistError as lost:  # whoever hosts the store is gone, or soon will have ended us
            if not self._over.wait(4 * ANSWER_SECONDS):
                self._leave(f"the run's store cannot be reached any more: {lost}")

    def _end(self, store: dist.Store, timeout: float) -> NoReturn:
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"rank_{self.rank}.stack").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        store.set(f"place_{self.rank}", place_of(self._main))
        if store.add("speakers", 1) == 1:
            keys = [f"place_{rank}" for rank in range(self.size)]
            deadline = time.monotonic() + ANSWER_SECONDS + 2 * min(timeout / LOOKS, LONGEST_PAUSE_SECONDS)
            while not store.check(keys) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            places = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in enumerate(keys)}
            blamed, lines = verdict(places)
            first = f"no rank has made progress for {timeout:g} s (launch.timeout):"
            text = "\n".join([first, *lines, f"stacks of all ranks: {self.logs}/rank_N.stack"])
            store.set("verdict", json.dumps([self.rank if blamed is None else blamed, text]))
        store.wait(["verdict"], timedelta(seconds=6 * ANSWER_SECONDS))
        blamed, said = json.loads(store.get("verdict"))
        if self.rank != blamed:
            time.sleep(HOLD_BACK_SECONDS)  # so that the one to blame is the first
        self._leave(said)

    def _leave(self, said: str) -> NoReturn:
        try:
            raise Hung(said)
        except Hung as hung:
            get_error_handler().record_exception(hung)
        if self.rank or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
            print(said, file=sys.stderr, flush=True)
        os._exit(1)


def place_of(thread: int | None) -> str:
    """Where a thread is, as "file:line in function: text of the line": in the innermost call that is neither torch's
    nor Python's own, with the function of torch.distributed that was called from there."""
    frame = sys._current_frames().get(thread or 0)
    stack = traceback.extract_stack(frame) if frame else []
    ours = [i for i, f in enumerate(stack) if not f.filename.startswith((TORCH, STANDARD, "<"))]
    if not ours:
        return "not in any function of ours"
    at, inside = stack[ours[-1]], stack[ours[-1] + 1 :]
    waits = next((f.name for f in inside if f.filename.startswith(DISTRIBUTED) and f.name != "wrapper"), None)
    said = f"{at.filename}:{at.lineno} in {at.name}: {at.line}"
    return f"{said} {WAITS}{waits}" if waits else said


WAITS = "-> torch.distributed, "


def verdict(places: Mapping[int, str]) -> tuple[int | None, list[str]]:
    """(the rank to blame, None for one that did not answer; lines that say where ranks are).

    places: by rank, "" for one that did not answer. Those come first, then ranks that do not wait in torch.distributed.
    """
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in places.items():
        ranks[place].append(rank)
    order = sorted(ranks, key=lambda place: (place != "", WAITS in place, ranks[place]))
    lines = [f"  {_named(ranks[place])}: {place or 'does not answer'}" for place in order[:MOST_PLACES]]
    more = [f"  and {len(order) - MOST_PLACES} other places"] if len(order) > MOST_PLACES else []
    return (min(ranks[order[0]]) if order[0] else None), [*lines, *more]


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "ranks " + ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
