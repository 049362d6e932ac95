"""Tokenizers from local files."""

from __future__ import annotations

import os
from typing import Any

from meg_compile.errors import Fault, Refused

END = "<|endoftext|>"
"""What GPT-2 puts after every document."""


def load_tokenizer(path: str, key: str = "data.tokenizer") -> Any:
    """A tokenizer of the tokenizers library.

    path: a `tokenizer.json`; or GPT-2's byte-level BPE (Radford et al. 2019) as `vocab.json` with a `merges.txt` beside
    it; or a folder that holds either. Refused, under `key`, where there is none.
    """
    from tokenizers import Tokenizer

    whole = os.path.join(path, "tokenizer.json")
    vocab = os.path.join(path, "vocab.json") if os.path.isdir(path) else path
    merges = os.path.join(os.path.dirname(vocab), "merges.txt")
    is_pair = os.path.isfile(vocab) and os.path.isfile(merges) and os.path.basename(path) != "tokenizer.json"
    if os.path.isdir(path) and not os.path.isfile(whole) and not is_pair:
        problem = "the folder holds no tokenizer.json, and no vocab.json with a merges.txt"
        raise Refused(Fault(key, path, problem, "name a folder that does"))
    try:
        if is_pair and not os.path.isfile(whole):
            return _byte_level(vocab, merges)
        with open(whole if os.path.isdir(path) else path, "rb") as file:
            return Tokenizer.from_buffer(file.read())
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror or error})"
        raise Refused(Fault(key, path, problem, "name a file that can be read")) from error
    except Exception as error:  # the library has no error class of its own
        problem = f"it is no {'vocab.json with merges.txt' if is_pair else 'tokenizer.json'} ({error})"
        raise Refused(Fault(key, path, problem, "name one saved by tokenizers")) from error


def _byte_level(vocab: str, merges: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END) is not None:
        tokenizer.add_special_tokens([END])
    return tokenizer
