"""Continue texts token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from meg_compile.generate.sample import Sampling
from meg_compile.runtime.decoder import Decoder


class Continuation(NamedTuple):
    """tokens: what follows a prompt, without a stop token. stopped: it ended with one."""

    tokens: list[int]
    stopped: bool


def continue_texts(
    decoder: Decoder,
    prompts: list[list[int]],
    num_tokens: int,
    sampling: Sampling,
    stop: int | None = None,
    texts: list[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Continuation]:
    """Up to `num_tokens` after each prompt, on every rank of a replica.

    All rows stand at the same position: one whose prompt is longer reads on while others already write. What a chunk
    holds beyond a prompt is overwritten in the caches before anything sees it.

    decoder: of one token and, for prompts, of as many as it has a program for; its rows are at least the prompts.
    texts:   the number of each prompt in the whole run, for its draws; by default its place in `prompts`.
    """
    rows, chunk = next(iter(decoder.executor.program.inputs.values())).shape[0], max(decoder.by_new)
    texts = list(range(len(prompts))) if texts is None else texts
    padded = prompts + [prompts[0]] * (rows - len(prompts))
    texts = texts + [texts[0]] * (rows - len(prompts))
    first, end = min(map(len, prompts)), max(map(len, prompts)) + num_tokens
    ids = torch.zeros(rows, decoder.at.total, dtype=torch.int64)
    for row, prompt in enumerate(padded):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    limits = torch.tensor([len(prompt) for prompt in padded])
    ended = torch.full((rows,), -1)

    logits = None
    for start in range(0, first, chunk):
        logits = decoder.logits(ids[:, start : start + chunk], start)
    at = (first - 1) % chunk
    for position in range(first, end):
        chosen = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        if logits is not None:
            chosen = sampling.pick(logits[:, at], texts, position)
        chosen = decoder.shared(chosen).cpu()
        ids[:, position] = torch.where(position < limits, ids[:, position], chosen)
        is_new = (position >= limits) & (ended < 0)
        done = position + 1 - limits >= num_tokens
        if stop is not None:
            done |= ids[:, position] == stop
        ended = torch.where(is_new & done, position + 1, ended)
        progress(position + 1 - first)
        if bool((ended >= 0).all()):
            break
        logits, at = decoder.logits(ids[:, position : position + 1], position), 0
    found = []
    for row, prompt in enumerate(prompts):
        tokens = ids[row, len(prompt) : int(ended[row])].tolist()
        stopped = stop is not None and tokens[-1:] == [stop]
        found.append(Continuation(tokens[:-1] if stopped else tokens, stopped))
    return found
