"""Prompts as tokens, and tokens as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from meg_compile.config import OWN
from meg_compile.errors import Fault, Refused
from meg_compile.train.tokenizer import load_tokenizer

BYTES = "bytes"
ENDS = 256  # what `python -m meg_compile.tokenize` puts after a document of bytes


class Bytes:
    """Each byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < ENDS).decode(errors="replace")

    def token(self, text: str) -> int | None:
        return text.encode()[0] if len(text.encode()) == 1 else None


class Learned:
    """A tokenizer of the tokenizers library."""

    def __init__(self, path: str):
        self.tokenizer = load_tokenizer(path, "generate.tokenizer")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def token(self, text: str) -> int | None:
        return self.tokenizer.token_to_id(text)


def words_of(config: Any) -> Bytes | Learned | None:
    """What the section `generate` reads texts with; None where nothing says it."""
    named = config.generate.tokenizer
    if named is None:
        named = config.data.args.get("tokenizer")
    if named is None and config.init.path is not None and os.path.isdir(config.init.path):
        folder = Path(config.init.path)
        named = config.init.path if any((folder / n).is_file() for n in ("tokenizer.json", "merges.txt")) else None
    elif named is None and config.data.target.startswith(f"{OWN}train.data."):
        named = BYTES
    return None if named is None else Bytes() if named == BYTES else Learned(named)


def prompts_of(config: Any, words: Bytes | Learned | None) -> list[list[int]]:
    """The token ids of each prompt. Refused for what is none."""
    settings, key, given = config.generate, "generate.prompts", config.generate.prompts
    if settings.file is not None:
        key = "generate.file"
        try:
            given = Path(settings.file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise Refused(Fault(key, settings.file, problem, "name a file with a prompt a line")) from error
    found = [_tokens(prompt, key, words) for prompt in given]
    if not found or not all(found):
        problem = "there is no prompt" if not found else f"prompt {found.index([]) + 1} is empty"
        raise Refused(Fault(key, settings.file or given, problem, 'use generate.prompts=["def "], say'))
    return found


def stop_of(config: Any, words: Bytes | Learned | None) -> int | None:
    """The token that ends a text. Refused for a text that is no token."""
    stop = config.generate.stop
    if not isinstance(stop, str):
        return stop
    token = words.token(stop) if words else None
    if token is None:
        problem = "it is not one token" if words else "no tokenizer is known that could tell which token it is"
        raise Refused(Fault("generate.stop", stop, problem, "give the number of a token"))
    return token


def _tokens(prompt: Any, key: str, words: Bytes | Learned | None) -> list[int]:
    if isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise Refused(Fault(key, prompt, "is neither a text nor a list of token ids", 'use ["def ", [3, 5]], say'))
    if words is None:
        problem = "prompts are texts, and nothing says with which tokenizer the model was trained"
        fix = "name a tokenizer.json, or `bytes`, or give prompts as lists of token ids"
        raise Refused(Fault("generate.tokenizer", None, problem, fix))
    return words.encode(prompt)
