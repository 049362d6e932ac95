"""task=generate: what the configuration asks for, compiled, and written text by text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import nn

from meg_compile.compiler import compile_decoder
from meg_compile.errors import Fault, Refused
from meg_compile.generate.loop import continue_texts
from meg_compile.generate.sample import Sampling
from meg_compile.generate.words import Bytes, Learned, prompts_of, stop_of, words_of
from meg_compile.plan import Plan
from meg_compile.program import Program
from meg_compile.runtime.decoder import Decoder
from meg_compile.runtime.groups import Groups
from meg_compile.train.batches import DTYPES

CHUNKS = (256, 64, 16)
ROWS = 16


@dataclass(frozen=True)
class Texts:
    """What is to be continued.

    prompts: token ids of each. batches: the numbers of the prompts that a replica works on together, those of like
    length, `rows` at most.
    """

    prompts: list[list[int]]
    words: Bytes | Learned | None
    stop: int | None
    tokens: int
    rows: int
    batches: list[list[int]]

    @property
    def total(self) -> int:
        """Positions of the longest text."""
        return max(map(len, self.prompts)) + self.tokens


def texts_of(config: Any) -> Texts:
    """Refused for prompts that are none."""
    words = words_of(config)
    prompts, stop = prompts_of(config, words), stop_of(config, words)
    share = -(-len(prompts) // decoding_plan(config).dp)
    rows = min(share, config.generate.rows or ROWS)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [order[start : start + rows] for start in range(0, len(order), rows)]
    return Texts(prompts, words, stop, config.generate.tokens, rows, batches)


def decoding_plan(config: Any) -> Plan:
    """The ranks of a plan, as they generate: each text has one replica, and nobody trains."""
    plan = config.plan.plan()
    whole = {"cp": 1, "sp": False, "zero": 0, "recompute": "none", "recompute_every": 1}
    return replace(plan, dp=plan.dp * plan.cp, **whole)


def decoder_programs(config: Any, texts: Texts, factory: Callable[[], nn.Module]) -> tuple[list[Program], int]:
    """(The programs of a `Decoder`, its total): for one new token and, where all prompts are long, for many at a time.

    Refused, as by `compile_decoder`, and for tokens that the model does not have.
    """
    shortest = min(map(len, texts.prompts))
    chunk = next((size for size in CHUNKS if size <= shortest), 1)
    try:
        total = -(-texts.total // chunk) * chunk
        programs = [_compiled(config, texts, factory, total, new) for new in dict.fromkeys((chunk, 1))]
    except Refused:
        if total == texts.total:
            raise
        total = texts.total  # there may be no room in the model for more
        programs = [_compiled(config, texts, factory, total, 1)]
    largest = max(max(prompt) for prompt in texts.prompts)
    for limit in programs[0].limits:
        if largest >= limit.size or min(min(prompt) for prompt in texts.prompts) < 0:
            problem = f"they hold token {largest}, and the model has {limit.size}"
            raise Refused(Fault("generate.prompts", None, problem, "use the tokenizer that the model was trained with"))
    return programs, total


def _compiled(config: Any, texts: Texts, factory: Callable[[], nn.Module], total: int, new: int) -> Program:
    torch.manual_seed(config.train.seed)
    ids = torch.zeros(texts.rows, total, dtype=torch.int64)
    return compile_decoder(factory, ids, new, decoding_plan(config), DTYPES[config.precision])


def generate(config: Any, texts: Texts, decoder: Decoder, groups: Groups, run_dir: Path) -> dict[str, Any]:
    """Continue all texts. Rank 0 prints them and writes `texts.jsonl`; every rank returns the figures for
    `result.json`."""
    settings, dp, at = config.generate, groups.mesh.dp, groups.coords
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed)
    mine = texts.batches[at.dp :: dp]
    console = Console(file=sys.stderr)
    shown = Progress(console=console, transient=True) if groups.rank == 0 and console.is_terminal else None
    started, found = time.perf_counter(), {}
    with shown or nullcontext():
        steps = sum(_longest(texts, batch) for batch in mine)
        bar = shown.add_task("generate", total=steps) if shown else None
        done = 0
        for batch in mine:
            prompts = [texts.prompts[number] for number in batch]

            def progress(position: int, done: int = done) -> None:
                if shown and bar is not None:
                    shown.update(bar, completed=done + position)

            given = continue_texts(decoder, prompts, texts.tokens, sampling, texts.stop, batch, progress)
            found |= dict(zip(batch, given, strict=True))
            done += _longest(texts, batch)
    every = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, found)
    seconds = time.perf_counter() - started
    whole = {number: one for of_rank in every for number, one in of_rank.items()}
    lines = [_line(texts, number, whole[number]) for number in range(len(texts.prompts))]
    num = sum(len(line["tokens"]) for line in lines)
    if groups.rank == 0:
        (run_dir / "texts.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        for number, line in enumerate(lines, 1):
            print(f"--- text {number} of {len(lines)}\n{line.get('text', line['tokens'])}", flush=True)
        print(f"{num} tokens in {seconds:.1f} s; {run_dir / 'texts.jsonl'}", flush=True)
    figures = {"num_texts": len(lines), "tokens": num, "generate_s": seconds, "tokens_per_s": num / seconds}
    return {"task": "generate", "status": "ok", "plan": config.to_dict()["plan"]} | figures


def _longest(texts: Texts, batch: list[int]) -> int:
    """Steps of a batch: from its shortest prompt to its longest text."""
    lengths = [len(texts.prompts[number]) for number in batch]
    return max(lengths) - min(lengths) + texts.tokens


def _line(texts: Texts, number: int, one: Any) -> dict[str, Any]:
    prompt = texts.prompts[number]
    text = {"text": texts.words.decode(prompt + one.tokens)} if texts.words else {}
    return {"prompt": prompt, "tokens": one.tokens, "stopped": one.stopped} | text
