"""Models built from the config.json of a folder of transformers; their weights come from `init.path`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from meg_compile.errors import Fault, Refused
from meg_compile.models.gpt2 import GPT2
from meg_compile.models.without_labels import without_labels
from meg_compile.weights import gpt2
from meg_compile.weights.files import DOWNLOAD, KEY, read_config


def gpt2_from_hf(path: str | None, dropout: float | None = None, qkv_layout: str = "thirds") -> GPT2:
    """Our GPT-2 with the sizes of a GPT-2 folder. dropout: null takes the folder's.

    Refused for another model, and for a GPT-2 that ours cannot be, such as one with another activation.
    """
    folder, config = _config(path)
    if faults := gpt2.foreign(config, folder):
        raise Refused(faults)
    rates = {key: config.get(key, gpt2.DEFAULTS[key]) for key in gpt2.DROPOUTS}
    if dropout is None:
        if len(set(rates.values())) > 1:
            problem = f"its config.json has dropouts that differ: {', '.join(f'{k}={v}' for k, v in rates.items())}"
            raise Refused(Fault(KEY, folder, problem, "choose one for all of them, as by model.dropout=0.1"))
        dropout = float(rates["embd_pdrop"])
    return GPT2(**gpt2.arguments(config), dropout=dropout, qkv_layout=qkv_layout)


def causal_lm_from_hf(path: str | None) -> nn.Module:
    """transformers' own model of a folder, whose forward gives the logits alone. It runs none of the folder's code."""
    folder, config = _config(path)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        problem = "this model is one of transformers, which is not installed"
        raise Refused(Fault(KEY, folder, problem, "pip install transformers")) from error
    kind = config.get("model_type")
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except ValueError as error:
        problem = f"transformers has no causal language model of model_type={kind}: {error}"
        raise Refused(Fault(KEY, folder, problem, "name its class as model._target_")) from error
    return without_labels(model)


def _config(path: str | None) -> tuple[Path, dict[str, Any]]:
    if path is None:
        raise Refused(Fault(KEY, None, "must be given for this model", f"add {KEY}=FOLDER"))
    folder = Path(path)
    config = read_config(folder)
    if config is None:
        problem = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
        raise Refused(Fault(KEY, path, problem, f"give a folder of transformers; {DOWNLOAD}"))
    return folder, config
