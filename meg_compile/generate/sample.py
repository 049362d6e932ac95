"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meg_compile.ops.counted import mix, row_keys


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token; else logits are divided by it. top_k: draw among the k likeliest
    alone. top_p: draw among the likeliest that together have this probability (Holtzman et al. 2020,
    arXiv:1904.09751). What is drawn depends on seed, text and position alone, not on the plan or the other texts.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def pick(self, logits: torch.Tensor, texts: list[int], position: int) -> torch.Tensor:
        """Token ids [rows] from logits [rows, V]; texts: the number of each row's text in the whole run."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scores = logits.double().cpu() / self.temperature
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        chances = ordered.softmax(-1)
        if self.top_k is not None:
            chances[..., self.top_k :] = 0
        if self.top_p is not None:  # the first is always kept
            chances[chances.cumsum(-1) - chances >= self.top_p * chances.sum(-1, keepdim=True)] = 0
        bounds = chances.cumsum(-1)
        uniform = (_uniform(mix(row_keys(self.seed, position, texts).sum(-1))) * bounds[:, -1]).unsqueeze(-1)
        at = torch.searchsorted(bounds, uniform, right=True).clamp(max=bounds.shape[-1] - 1)
        return ids.gather(-1, at).squeeze(-1).to(logits.device)


def _uniform(hashed: torch.Tensor) -> torch.Tensor:
    """int64 hashes as numbers in [0, 1)."""
    return ((hashed >> 11) & (2**53 - 1)).double() / 2**53
