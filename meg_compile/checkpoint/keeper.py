"""Checkpoints in a training loop, as the configuration's section `checkpoint` asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meg_compile.checkpoint.folder import name_of
from meg_compile.checkpoint.resume import resume
from meg_compile.checkpoint.saver import Saver
from meg_compile.checkpoint.state import counters_of, tensors_of
from meg_compile.checkpoint.stop import Stop


class Keeper:
    """A context around a training loop: `start` says from which step on, then `after` every step.

    start    steps that are done: those of the checkpoint that the run goes on from, or 0
    earlier  the `metrics.jsonl` that has them
    stopped  the signal that ended the loop early, 0 for none
    saved    the checkpoint that was written last
    """

    def __init__(self, config: Any, trainer: Any, run_dir: Path):
        self.config, self.trainer, self.metrics = config, trainer, run_dir / "metrics.jsonl"
        self.stopped, self.saved = 0, ""
        found = resume(config, trainer)
        self.start = found.state["step"] if found else 0
        self.earlier = Path(found.state["metrics"]) if found else None
        settings = config.checkpoint
        self.saver, self.stop = None, Stop(settings.signal)
        if settings.dir is not None:
            self.saver = Saver(Path(settings.dir), settings.background, settings.keep, settings.keep_every)
            trainer.asked = self.stop.asked

    def __enter__(self) -> Keeper:
        if self.saver:
            self.stop.__enter__()
        return self

    def after(self, step: int, asked: int) -> bool:
        """To be called when `step` steps are done; saves where one is due. asked: the signal to stop by, 0 for none.

        Returns whether to stop here.
        """
        if self.saver is None:
            return False
        every, last = self.config.checkpoint.every, step == self.config.train.steps
        if asked or last or (every is not None and step % every == 0):
            state = counters_of(self.trainer, step, self.config) | {"metrics": str(self.metrics.absolute())}
            with self.trainer.timers("checkpoint"):
                self.saver.save(step, tensors_of(self.trainer), state)
            self.saved = str(self.saver.directory / name_of(step))
        self.stopped = 0 if last else asked
        return bool(self.stopped)

    def figures(self) -> dict[str, Any]:
        """For `result.json`."""
        found = {"resumed_step": self.start or None, "checkpoint": self.saved or None}
        return found | ({"status": "stopped", "signal": self.stopped} if self.stopped else {})

    def __exit__(self, kind: Any, *_: object) -> None:
        if self.saver is None:
            return
        try:
            self.saver.wait() if kind is None else self.saver.abandon()
        finally:
            self.stop.__exit__()
