"""Losses for models that return logits."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The mean of -log p(label) over the labels that are not `ignore_index`, a scalar.

    logits [..., V], labels [...]; the labels are already shifted: `labels[b, t]` is the token that follows
    `input_ids[b, t]`. Where no label counts the mean is nan.
    """
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)
