"""Our GPT-2 and transformers' GPT2LMHeadModel: the same model in two notations.

transformers keeps the weights of a block's products as Conv1D does, `[in, out]`, puts `transformer.` before every name
but the head's, and leaves a tied head out. The rows of `c_attn` are q | k | v there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn

from meg_compile.errors import Fault
from meg_compile.models.gpt2 import GPT2
from meg_compile.weights.files import KEY, Entry

PREFIX = "transformer."
HEAD = "lm_head.weight"
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
FUSED = ("attn.c_attn.weight", "attn.c_attn.bias")
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")

# GPT2Config's own values, for what a config.json leaves out.
DEFAULTS = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
DEFAULTS |= {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
# Its key -> our argument. What these say can be given to our model.
SIZES = {"vocab_size": "vocab_size", "n_positions": "context", "n_embd": "hidden", "n_layer": "layers"}
SIZES |= {"n_head": "heads", "tie_word_embeddings": "tied"}
# What it must say, where it says it, since our model can do nothing else.
FIXED = {"activation_function": TANH_GELUS, "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,)}
FIXED |= {"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "model_type": ("gpt2",)}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")


def is_ours(model: nn.Module) -> TypeGuard[GPT2]:
    """Whether it is our GPT-2, and no class of a user's that is made from it and may compute something else."""
    return type(model) is GPT2


def is_conv1d(entries: Mapping[str, Entry]) -> bool:
    """Whether weights of a GPT-2 are in transformers' layout: `c_attn` has three times as many columns as rows."""
    shapes = (entry.shape for key, entry in entries.items() if key.endswith("attn.c_attn.weight"))
    return next((len(s) == 2 and s[1] == 3 * s[0] for s in shapes), any(key.startswith(PREFIX) for key in entries))


def key_of(name: str) -> str:
    """transformers' name of one of our parameters."""
    return name if name == HEAD else PREFIX + name


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if name.endswith(CONV1D) else shape


def to_conv1d(model: GPT2, name: str, ours: Tensor) -> Tensor:
    """A whole parameter as transformers keeps it; a view, except of a `c_attn` whose q, k and v lie head by head."""
    if name.endswith(FUSED) and _is_per_head(model):
        ours = ours.unflatten(0, (_heads(model), 3, -1)).transpose(0, 1).flatten(0, 2)
    return ours.t() if name.endswith(CONV1D) else ours


def from_conv1d(model: GPT2, name: str, theirs: Tensor) -> Tensor:
    """The way back."""
    ours = theirs.t() if name.endswith(CONV1D) else theirs
    if name.endswith(FUSED) and _is_per_head(model):
        ours = ours.unflatten(0, (3, _heads(model), -1)).transpose(0, 1).flatten(0, 2)
    return ours


def config_of(model: GPT2) -> dict[str, Any]:
    """What GPT2Config has to be told for the same model. The beginning and the end of a text are GPT-2's own token,
    where the vocabulary is GPT-2's."""
    end_of_text = 50256 if model.wte.num_embeddings == 50257 else None
    dropout = model.drop.p
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.wte.num_embeddings,
        "n_positions": model.context,
        "n_embd": model.wte.embedding_dim,
        "n_layer": len(model.h),
        "n_head": _heads(model),
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.ln_f.eps,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "resid_pdrop": dropout,
        "tie_word_embeddings": model.lm_head.weight is model.wte.weight,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our GPT-2's sizes, from a config.json in which `foreign` finds nothing."""
    full = DEFAULTS | {"tie_word_embeddings": True} | dict(config)
    return {ours: full[theirs] for theirs, ours in SIZES.items()}


def foreign(config: Mapping[str, Any], path: Path) -> list[Fault]:
    """What a config.json says that our GPT-2 cannot be."""
    faults = []
    for key, allowed in FIXED.items():
        if (said := config.get(key, allowed[0])) not in allowed:
            faults.append(_foreign(path, key, said, " or ".join(map(str, allowed))))
    inner, hidden = config.get("n_inner"), config.get("n_embd", DEFAULTS["n_embd"])
    if inner not in (None, 4 * hidden):
        faults.append(_foreign(path, "n_inner", inner, f"4 x n_embd={hidden}"))
    return faults


def differences(model: GPT2, config: Mapping[str, Any], path: Path) -> list[Fault]:
    """Where a config.json speaks of another model than this one; dropout may differ."""
    mine, theirs, faults = arguments(config_of(model)), arguments(config), foreign(config, path)
    for argument, said in theirs.items():
        if said != (has := mine[argument]) and (argument != "heads" or len(model.h)):
            key = next(key for key, ours in SIZES.items() if ours == argument)
            said = str(said).lower() if isinstance(said, bool) else said
            fix = f"use model.{argument}={said}, or model=gpt2_from_hf, which has all sizes of {path}"
            faults.append(Fault(f"model.{argument}", has, f"the config.json of init.path has {key}={said}", fix))
    return faults


def _foreign(path: Path, key: str, said: Any, needed: str) -> Fault:
    fix = "use model=causal_lm_from_hf, which is transformers' own model"
    return Fault(KEY, path, f"its config.json has {key}={said}, and our GPT-2 {needed}", fix)


def _heads(model: GPT2) -> int:
    return model.h[0].attn.heads if len(model.h) else 1  # type: ignore[union-attr]


def _is_per_head(model: GPT2) -> bool:
    return model.h[0].attn.qkv_layout == "per_head"  # type: ignore[union-attr]
