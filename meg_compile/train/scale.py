"""The factor of the loss in fp16, whose gradients would otherwise fall below 6e-8 and be lost.

Micikevicius et al. 2018 (arXiv:1710.03740), with Megatron-LM's constants but for the start (there 2^32, which costs
some twenty steps of overflow first).
"""

from __future__ import annotations

START, SMALLEST = 2.0**16, 1.0
GROWTH, WINDOW = 2.0, 1000
BACKOFF, HYSTERESIS = 0.5, 2


class LossScale:
    """`value` multiplies the loss; gradients are divided by it. A step whose gradients overflow is skipped.

    Halved after the HYSTERESIS-th overflow and each one that follows, until it grows: doubled after WINDOW steps in a
    row without one. `fixed` never moves, and no step is skipped.
    """

    def __init__(self, fixed: float | None = None):
        self.value = START if fixed is None else fixed
        self.adapts = fixed is None
        self._good_steps, self._patience = 0, HYSTERESIS

    @property
    def may_fall(self) -> bool:
        """Whether an overflow may be the scale's fault, so that skipping the step helps."""
        return self.adapts and self.value > SMALLEST

    def state(self) -> dict[str, float]:
        """What `load` takes, for a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps, "patience": self._patience}

    def load(self, state: dict[str, float]) -> None:
        """Go on as the scale that gave `state`; a fixed one stays."""
        if self.adapts:
            self.value, self._good_steps = state["value"], int(state["good_steps"])
            self._patience = int(state["patience"])

    def update(self, overflow: bool) -> None:
        """To be called once a step."""
        if not self.adapts:
            return
        if overflow:
            self._good_steps = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value * BACKOFF, SMALLEST)
            return
        self._good_steps += 1
        if self._good_steps == WINDOW:
            self._good_steps, self._patience = 0, HYSTERESIS
            self.value *= GROWTH
