"""Which part of a dataset is for training, validation and test."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal

from meg_compile.errors import Fault, Refused

Part = Literal["train", "valid", "test"]
PARTS = ("train", "valid", "test")


def cut(split: str | list[float], part: str, num: int) -> tuple[int, int]:
    """(first, end) of a part of `num` sequences, as Megatron-LM cuts them: in order, at the rounded sums of the ratios.

    The sums are rounded as Megatron-LM's, one addition after another, so that halves fall on the same side.
    split: up to three ratios, as "969,30,1" or [969, 30, 1]. Refused for what are none.
    """
    try:
        ratios = [float(ratio) for ratio in (split.split(",") if isinstance(split, str) else split)]
        *_, total = accumulate(ratios)
        if len(ratios) > 3 or min(ratios) < 0 or not 0 < total < math.inf:
            raise ValueError
    except (TypeError, ValueError):
        problem = "is not up to three ratios, for training, validation and test"
        raise Refused(Fault("data.split", split, problem, "use data.split=[969,30,1], say")) from None
    shares = [ratio / total for ratio in ratios] + [0.0] * (3 - len(ratios))
    ends = [round(end * num) for end in accumulate(shares, initial=0.0)]
    return ends[PARTS.index(part)], ends[PARTS.index(part) + 1]
