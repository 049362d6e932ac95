"""Models as Hugging Face transformers has them, small: two layers, sizes that four ranks divide, no dropout.

Each entry of `FAMILIES` names the class and the config of transformers, and what its batch holds. `build` makes the
model with random weights; nothing of it is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, VOCAB = 4, 8, 64
HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 8, 4, 128, 2

Batch = dict[str, Tensor]


def tokens(step: int) -> Batch:
    """Token ids and labels [ROWS, TOKENS], the labels for a model that shifts them; some do not count."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(1, VOCAB, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels.view(-1)[torch.randperm(ROWS * TOKENS, generator=generator)[:3]] = -100
    return {"input_ids": ids, "labels": labels}


def pairs(step: int) -> Batch:
    """Of an encoder-decoder: input_ids and labels; the decoder's inputs are the labels shifted by the model."""
    batch = tokens(step)
    return {"input_ids": batch["input_ids"].flip(1), "labels": batch["labels"]}


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) * 3 % 8}


def sounds(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(ROWS, 16, 32, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": tokens(step)["labels"]}


@dataclass(frozen=True)
class Family:
    """A model of transformers.

    model, config: its classes, by name.
    sizes:         what the config is given.
    batch:         the global batch of a step, as the model's forward takes it.
    """

    model: str
    config: str
    sizes: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int], Batch] = tokens
    loss = None  # the model's own

    def build(self) -> nn.Module:
        import transformers

        return getattr(transformers, self.model)(self.make_config())

    def make_config(self) -> Any:
        import transformers

        sizes = dict(self.sizes)
        attention = sizes.pop("attn_implementation", None)
        config = getattr(transformers, self.config)(**sizes)
        if attention:
            config._attn_implementation = attention
        return config


GPT2 = dict(vocab_size=VOCAB, n_positions=16, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS) | dict(
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
)
COMMON = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS) | dict(
    intermediate_size=FFN, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, pad_token_id=0
)
GQA = COMMON | dict(num_key_value_heads=KV_HEADS)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

FAMILIES = {
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", GPT2),
    "GPT-2, eager": Family("GPT2LMHeadModel", "GPT2Config", GPT2 | dict(attn_implementation="eager")),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON | dict(attention_dropout=0.0, hidden_dropout=0.0)),
    "GPT-J": Family("GPTJForCausalLM", "GPTJConfig", GPT2 | dict(rotary_dim=4)),
    "OPT": Family(
        "OPTForCausalLM",
        "OPTConfig",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=FFN)
        | dict(max_position_embeddings=16, dropout=0.0, word_embed_proj_dim=HIDDEN, bos_token_id=0, eos_token_id=0),
    ),
    "Phi": Family("PhiForCausalLM", "PhiConfig", GQA | dict(embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0)),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", GQA),
    "Llama, eager": Family("LlamaForCausalLM", "LlamaConfig", GQA | dict(attn_implementation="eager")),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", GQA | dict(sliding_window=4)),
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", GQA),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GQA | dict(head_dim=8)),
    "Gemma 2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", GQA | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
    ),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GQA
        | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=4)
        | dict(layer_types=["sliding_attention", "full_attention"]),
    ),
    "StarCoder2": Family(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        GQA | dict(residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0),
    ),
    "BLOOM": Family(
        "BloomForCausalLM",
        "BloomConfig",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, hidden_dropout=0.0)
        | dict(attention_dropout=0.0, bos_token_id=0, eos_token_id=0),
    ),
    "Falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
        | dict(num_kv_heads=KV_HEADS, new_decoder_architecture=True, bos_token_id=0, eos_token_id=0),
    ),
    "Falcon, alibi": Family(
        "FalconForCausalLM",
        "FalconConfig",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
        | dict(alibi=True, multi_query=False, new_decoder_architecture=False, bos_token_id=0, eos_token_id=0),
    ),
    "BERT": Family("BertForMaskedLM", "BertConfig", COMMON | NO_DROPOUT),
    "BERT, eager": Family("BertForMaskedLM", "BertConfig", COMMON | NO_DROPOUT | dict(attn_implementation="eager")),
    "RoBERTa": Family("RobertaForMaskedLM", "RobertaConfig", COMMON | NO_DROPOUT),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN)
        | dict(image_size=16, patch_size=4, num_labels=8)
        | NO_DROPOUT,
        images,
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        dict(vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0)
        | dict(decoder_start_token_id=0, pad_token_id=0),
        pairs,
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS)
        | dict(encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN)
        | dict(num_mel_bins=16, max_source_positions=16, max_target_positions=16, dropout=0.0, attention_dropout=0.0)
        | dict(decoder_start_token_id=1, pad_token_id=0, bos_token_id=0, eos_token_id=0),
        sounds,
    ),
    "Mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        GQA | dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "Qwen3-MoE": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        GQA | dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
}


def full(tokens_in_a_row: int) -> Callable[[int], Batch]:
    """One row of so many tokens, without storage."""

    def batch(step: int) -> Batch:
        return {
            name: torch.empty(1, tokens_in_a_row, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")
        }

    return batch


FULL_SIZE = {
    "Llama-3-8B": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
        | dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192),
        full(8192),
    ),
    "GPT-NeoX-20B": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        dict(vocab_size=50432, hidden_size=6144, intermediate_size=24576, num_hidden_layers=44, num_attention_heads=64),
        full(2048),
    ),
    "Gemma-2-9B": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42)
        | dict(num_attention_heads=16, num_key_value_heads=8, head_dim=256),
        full(8192),
    ),
    "Qwen3-8B": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)
        | dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=8192),
        full(8192),
    ),
    "Mixtral-8x7B": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
        | dict(num_attention_heads=32, num_key_value_heads=8),
        full(4096),
    ),
}
