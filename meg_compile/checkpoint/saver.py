"""Saving while training goes on: one checkpoint at a time, written by a thread of every rank."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from meg_compile.checkpoint.files import write_json, write_tensors
from meg_compile.checkpoint.folder import MANIFEST, PART, name_of, prune, publish, steps_in
from meg_compile.checkpoint.pieces import Held
from meg_compile.checkpoint.storage import SavePlanner, Stager, rank_file
from meg_compile.errors import MegError

LOOK_SECONDS = 0.02
NICENESS = 5  # of a thread that writes while training goes on: it gets a third of a core that both want
PATIENCE_SECONDS = 10  # for what is being written when a rank fails, and then by its peers; all end within 30


class Saver:
    """Saves of one run into `directory`; all ranks call the same methods in the same order.

    A save takes what is to be written (in the background: a copy on the CPU, into the memory of the one before) and
    returns. Each rank then writes its file and a note of it; when rank 0 finds the notes of all, the checkpoint counts,
    and old ones go. What goes wrong is a MegError on every rank, at the next call.
    """

    def __init__(self, directory: Path, background: bool, keep: int, keep_every: int | None):
        self.directory, self.background, self.keep, self.keep_every = directory, background, keep, keep_every
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.step: int | None = None
        """Of the checkpoint that was begun last."""
        self._thread: threading.Thread | None = None
        self._copies: dict[str, torch.Tensor] | None = {} if background else None
        self._written, self._given_up, self._problem = threading.Event(), threading.Event(), ""

    def save(self, step: int, tensors: Mapping[str, Held], state: Mapping[str, Any]) -> None:
        """Begin the checkpoint of `step` steps, once the one before is finished.

        tensors: what this rank holds of every tensor. state: all else, plain values; rank 0's counts.
        """
        self.wait()
        self.step, self._problem = step, ""
        self._written.clear()
        self._given_up.clear()
        stager = Stager(self._part, self._copies)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said of a single process
                dcp.save(dict(tensors), storage_writer=stager, planner=SavePlanner(), no_dist=self.world == 1)
        except CheckpointException as failed:
            errors = [error for error, _ in failed.failures.values()]
            raise MegError(self._failed("; ".join(dict.fromkeys(map(_said, errors))))) from errors[0]
        self._thread = threading.Thread(target=self._work, args=(stager, dict(state)), name="checkpoint", daemon=True)
        self._thread.start()
        if not self.background:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. MegError, on every rank, where that failed; what it left is removed."""
        if self._thread is None:
            return
        self._written.wait()
        if any(self._from_all(self._problem)):
            self._given_up.set()
        self._thread.join()
        self._thread = None
        if found := "; ".join(dict.fromkeys(filter(None, self._from_all(self._problem)))):
            if self.rank == 0:
                shutil.rmtree(self._part, ignore_errors=True)
            raise MegError(self._failed(found))

    def abandon(self) -> None:
        """When this rank fails: finish what is being written, if that is soon. Speaks to no other rank."""
        if self._thread is not None:
            self._thread.join(PATIENCE_SECONDS)
            self._given_up.set()

    @property
    def _part(self) -> Path:
        return self.directory / f"{name_of(self.step or 0)}{PART}"

    def _work(self, stager: Stager, state: dict[str, Any]) -> None:
        if self.background and sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._write(stager, state)
            self._written.set()
            if self.rank == 0:
                self._count()
        except Exception as error:
            self._problem = _said(error)
        finally:
            self._written.set()

    def _write(self, stager: Stager, state: dict[str, Any]) -> None:
        files, part = {}, self._part
        if stager.staged:
            name = rank_file(self.rank)
            files[name] = write_tensors(part / name, stager.staged)
        if self.rank == 0:
            files["index.json"] = write_json(part / "index.json", stager.index)
            files["state.json"] = write_json(part / "state.json", state)
        stager.staged.clear()
        note = part / f"note_{self.rank}"
        write_json(note, files)
        note.rename(note.with_suffix(".json"))

    def _count(self) -> None:
        """Let the checkpoint count, when all ranks have written theirs."""
        notes = [self._part / f"note_{rank}.json" for rank in range(self.world)]
        while not all(note.exists() for note in notes):
            if self._given_up.is_set():
                return
            time.sleep(LOOK_SECONDS)
        files = {}
        for note in notes:
            files |= json.loads(note.read_bytes())
            note.unlink()
        assert self.step is not None
        publish(self._part, files)
        prune(self.directory, self.step, self.keep, self.keep_every)

    def _from_all(self, problem: str) -> list[str]:
        found = [problem] * self.world
        if self.world > 1:
            dist.all_gather_object(found, problem)
        return found

    def _failed(self, problem: str) -> str:
        good = [n for n in steps_in(self.directory) if (self.directory / name_of(n) / MANIFEST).is_file()]
        rest = f"the last one there is {name_of(good[-1])}" if good else "there is none before it"
        return f"checkpoint.dir={self.directory}: {name_of(self.step or 0)} cannot be written: {problem}; {rest}"


def _said(error: BaseException) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
