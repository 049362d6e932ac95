"""Models of transformers, told by their classes, so that transformers need not be there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from meg_compile.errors import Fault
from meg_compile.weights.files import KEY

# Keys of a config.json that say nothing about what the model computes from its weights.
WITHOUT_MEANING = re.compile(
    r"transformers_version|architectures|dtype|torch_dtype|_name_or_path|use_cache|initializer_\w+|\w*drop\w*|\w*pdrop"
    r"|\w+_token_id|output_\w+|return_dict|id2label|label2id|problem_type|summary_\w+|task_specific_params|auto_map"
    r"|_attn_implementation\w*|_experts_implementation\w*|chunk_size_feed_forward|router_aux_loss_coef|finetuning_task"
)


def is_theirs(model: nn.Module) -> bool:
    """Whether it is a model of transformers, whose `config` can be written as config.json."""
    classes = type(model).__mro__
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in classes)


def config_of(model: Any) -> dict[str, Any]:
    """Its config.json."""
    return json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}


def left_out(model: Any) -> set[str]:
    """The names in its state_dict that `save_pretrained` does not write: tied ones, and what it is told to leave."""
    return {*(getattr(model, "all_tied_weights_keys", None) or {}), *(model._keys_to_ignore_on_save or ())}


def prefix_of(model: Any) -> str:
    """What stands before the names of the model inside, if it has a head."""
    return f"{model.base_model_prefix}." if model.base_model_prefix else ""


def differences(model: Any, config: Mapping[str, Any], path: Path) -> list[Fault]:
    """Where a config.json speaks of another model than this one."""
    if (said := config.get("model_type")) != model.config.model_type:
        problem = (
            f"its config.json is one of model_type={said}, and {type(model).__name__} is {model.config.model_type}"
        )
        return [Fault(KEY, path, problem, "use model=causal_lm_from_hf, or name the class that it is of")]
    mine, theirs = config_of(model), type(model.config).from_dict(dict(config)).to_dict()
    wrong = [
        f"{key}={theirs[key]} (the model has {mine[key]})"
        for key in sorted(mine.keys() & theirs.keys())
        if not WITHOUT_MEANING.fullmatch(key) and mine[key] != json.loads(json.dumps(theirs[key], default=str))
    ]
    if not wrong:
        return []
    fix = "give the model's config these values, or use model=causal_lm_from_hf"
    return [Fault(KEY, path, f"its config.json has {', '.join(wrong)}", fix)]
