"""Small plain models that between them hold what people write in forward: the compiler must get each of them right.

Each entry of `ZOO` is a `Case`: a builder, its data, and which parameters tensor parallelism cuts in it. Two layers
where not said otherwise; sizes divide by 4. Every parameter is drawn at random, biases and norms too, so that one that
is added twice or read by the wrong rank cannot hide behind a zero.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from compare import Batch, Case
from torch import nn
from zoo_layers import (
    HEADS,
    HIDDEN,
    TOKENS,
    Alibi,
    Cached,
    Chain,
    ComplexRotary,
    Dropless,
    Einsum,
    EinsumRms,
    Expanded,
    Experts,
    Fourier,
    FusedSwiGlu,
    Gated,
    Glu,
    Grouped,
    GroupedFused,
    Heads,
    InPlace,
    Interleaved,
    Lora,
    Masked,
    Mirror,
    Mlp,
    NormedFfn,
    NormedHeads,
    Reweighted,
    Rotary,
    Sinks,
    SwiGlu,
    TalkingHeads,
)
from zoo_models import (
    VOCAB,
    ArgmaxRouted,
    Block,
    Capped,
    ChannelLoss,
    Classified,
    Constants,
    ConvStem,
    CpuConstants,
    DetachedTie,
    Encoder,
    ExtraTerm,
    Frozen,
    HandMse,
    Lm,
    LogProbLoss,
    Mixer,
    MixerLm,
    OwnLoss,
    ParallelBlock,
    PerTokenLoss,
    Picked,
    Regression,
    RelativeBias,
    ScaledBlock,
    SharedBias,
    SlotMixer,
    SmoothedLoss,
    StopGradient,
    SummedLoss,
    TimeSeries,
    Twice,
    TwiceEach,
    TwoHeads,
    TwoInputs,
    UNet,
    Unnumbered,
    Unused,
)

from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy

ROWS = 4


def tokens(step: int, vocab: int = VOCAB, ignored: int = 5) -> Batch:
    """Token ids and labels [ROWS, TOKENS]; `ignored` of the labels do not count, in uneven numbers per row."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels.view(-1)[torch.randperm(ROWS * TOKENS, generator=generator)[:ignored]] = -100
    labels[0, :3] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def stirred(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def case(make: Callable[[], nn.Module], *sharded: str, vocab: int = VOCAB, **options) -> Case:
    return Case(partial(stirred, make), options.pop("batch", partial(tokens, vocab=vocab)), sharded, **options)


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    if isinstance(out, dict):
        return out["loss"]
    return out[0] if isinstance(out, tuple) else getattr(out, "loss", out)


def two_inputs(step: int) -> Batch:
    batch = tokens(step)
    generator = torch.Generator().manual_seed(step)
    keep = torch.rand(ROWS, TOKENS, generator=generator) < 0.8
    keep[:, 0] = True
    return batch | {"segments": torch.randint(0, 4, (ROWS, TOKENS), generator=generator), "keep": keep.long()}


def two_inputs_loss(model, batch):
    return cross_entropy(model(batch["input_ids"], batch["segments"], batch["keep"]), batch["labels"])


def class_labels(step: int) -> Batch:
    return {"input_ids": tokens(step)["input_ids"], "labels": torch.arange(ROWS) * 3 % 8}


def class_loss(logits, labels):
    return F.cross_entropy(logits, labels)


def class_objective(model, batch):
    return class_loss(model(batch["input_ids"]), batch["labels"])


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"image": torch.randn(ROWS, 3, 8, 8, generator=generator).double(), "labels": torch.arange(ROWS) * 3 % 8}


def series(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(ROWS, TOKENS, HIDDEN, generator=generator).double(), "labels": torch.arange(ROWS) * 3 % 8}


def vectors(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, HIDDEN, generator=generator).double()
    return {"x": x, "y": y}


def even_tokens(step: int) -> Batch:
    """Every label counts, so micro-batches count alike."""
    batch = tokens(step)
    return batch | {"labels": batch["input_ids"].flip(0)}


def gpt2(**options) -> Callable[[], nn.Module]:
    return partial(
        GPT2, **{"vocab_size": VOCAB, "context": 12, "layers": 2, "hidden": HIDDEN, "heads": HEADS} | options
    )


def lm(attn=Heads, mlp=Mlp, block=Block, model=Lm, **options) -> Callable[[], nn.Module]:
    return partial(model, block=partial(block, attn, mlp), **options)


QKVO = ("*.attn.[qkv].weight", "*.attn.[qkv].bias", "*.attn.o.weight")
PAIR = ("*.fc1.weight", "*.fc1.bias", "*.fc2.weight")
ENDS = ("wte.weight", "head.weight")
ALL = (*QKVO, *PAIR, *ENDS)
GPT = ("*.c_attn.*", "*.c_proj.weight", "*.c_fc.*", "wte.weight")

ZOO: dict[str, Case] = {
    **{
        f"gpt2_{layout}_{'tied' if tied else 'untied'}": case(
            gpt2(tied=tied, qkv_layout=layout), *GPT, *(() if tied else ("lm_head.weight",))
        )
        for layout in ("thirds", "stacked", "per_head")
        for tied in (True, False)
    },
    # attention
    "separate": case(lm(), *ALL),
    "cached": case(lm(Cached), *ALL),
    "interleaved_kv": case(lm(partial(Interleaved, heads=8, kv=4)), *ALL),
    "expanded_kv": case(lm(partial(Expanded, heads=8, kv=4)), *ALL),
    "grouped_kv": case(lm(partial(Grouped, heads=8, kv=4)), *ALL),
    "fused_grouped_kv": case(lm(GroupedFused), "*.qkv.*", "*.o.weight", *PAIR, *ENDS),
    "masked": case(lm(Masked), *ALL),
    "einsum": case(lm(Einsum), *ALL),
    "rotary": case(lm(Rotary), *ALL),
    "rotary_grouped": case(lm(partial(type("RotaryGrouped", (Rotary, Grouped), {}), heads=8, kv=4)), *ALL),
    "complex_rotary": case(lm(ComplexRotary), *ALL),
    "fourier": case(lm(Fourier), "*.attn.v.*", "*.attn.o.weight", *PAIR, *ENDS),
    "norm_per_head": case(lm(NormedHeads), *ALL),
    "rms_per_head": case(lm(partial(NormedHeads, norm="rms")), *ALL),
    "hand_rms_per_head": case(lm(partial(NormedHeads, norm="by_hand")), *ALL),
    "alibi": case(lm(Alibi), *ALL),
    "sinks": case(lm(Sinks), *ALL, "*.attn.scale", "*.attn.sink"),
    "talking_heads": case(lm(TalkingHeads), "*.attn.v.*", "*.attn.o.weight", "*.talk", *PAIR, *ENDS),
    "gated": case(lm(Gated), "*.qkvg.*", "*.attn.o.weight", *PAIR, *ENDS),
    # feed-forward
    "swiglu": case(lm(mlp=SwiGlu), *QKVO, "*.gate.weight", "*.up.weight", "*.down.weight", *ENDS),
    "fused_swiglu": case(lm(mlp=FusedSwiGlu), *QKVO, "*.gate_up.*", "*.down.weight", *ENDS),
    "glu": case(lm(mlp=Glu), *QKVO, "*.gate_up.*", "*.down.weight", *ENDS),
    "lora": case(lm(mlp=Lora), *ALL, "*.b1.weight", "*.a2.weight"),
    "chain": case(lm(mlp=Chain), *QKVO, "*.maps.0.*", "*.maps.1.weight", "*.maps.2.*", "*.maps.3.weight", *ENDS),
    **{
        f"{kind}_in_pair": case(lm(mlp=partial(NormedFfn, kind)), *QKVO, *ENDS)
        for kind in "norm rms softmax max cumsum standardise flip sort pick sum".split()
    },
    "position_in_pair": case(lm(mlp=partial(NormedFfn, "position")), *ALL),
    "experts": case(lm(mlp=Experts), *QKVO, "*.up", "*.down", *ENDS),
    "function_of_weight": case(lm(mlp=Reweighted), *ALL, "*.scale"),
    "function_of_row": case(lm(mlp=partial(Reweighted, row=True)), *QKVO, *ENDS),
    "mirror": case(lm(mlp=Mirror), *QKVO, "*.mlp.weight", "*.b1", *ENDS),
    "einsum_rms": case(lm(mlp=EinsumRms), *ALL),
    "in_place": case(lm(mlp=InPlace), *ALL),
    "dropless": case(lm(mlp=Dropless), *ALL),
    # blocks
    "parallel_block": case(lm(block=ParallelBlock), *ALL),
    "scaled_block": case(lm(block=ScaledBlock), *ALL),
    "mixer": case(
        partial(MixerLm, block=Mixer),
        *("*.channels.fc1.*", "*.channels.fc2.weight", "*.tokens.fc1.*", "*.tokens.fc2.weight", *ENDS),
    ),
    "slot_mixer": case(partial(MixerLm, block=SlotMixer), "*.channels.fc1.*", "*.channels.fc2.weight", *ENDS),
    "time_series": case(
        TimeSeries,
        "head.*",
        batch=series,
        objective=lambda model, batch: class_loss(model(batch["x"]), batch["labels"]),
        loss=class_loss,
    ),
    # whole models
    "tied": case(lm(tied=True), *QKVO, *PAIR, "wte.weight"),
    "head_bias": case(lm(head_bias=True), *ALL, "head.bias"),
    "capped": case(lm(model=Capped), *ALL),
    "picked": case(lm(model=Picked), *ALL),
    "detached_tie": case(lm(model=DetachedTie), *ALL),
    "padding_idx": case(lm(padding_idx=3), *ALL),
    "padding_idx_tied": case(lm(padding_idx=17, tied=True), *ALL),
    "vocab_101": case(lm(vocab=101), *ALL, vocab=101),
    "vocab_101_tied": case(lm(vocab=101, tied=True), *ALL, vocab=101),
    "vocab_5": case(lm(vocab=5, head_bias=True), *ALL, "head.bias", vocab=5),
    "vocab_5_tied": case(lm(vocab=5, tied=True), *ALL, vocab=5),
    **{
        f"own_loss_{kind}": case(lm(model=partial(OwnLoss, kind)), *ALL, objective=own_loss, loss=None)
        for kind in ("scalar", "dict", "tuple", "dataclass")
    },
    "two_inputs": case(TwoInputs, *ALL, "segments.weight", batch=two_inputs, objective=two_inputs_loss),
    "relative_bias": case(RelativeBias, *ALL, "table.weight"),
    "shared_relative_bias": case(SharedBias, *ALL, "table.weight"),
    "twice": case(lm(model=Twice), *ALL),
    "twice_in_place": case(lm(model=TwiceEach), *ALL),
    "frozen": case(Frozen, *QKVO, *PAIR, "head.weight"),
    "unused": case(Unused, *ALL),
    "stop_gradient": case(lm(model=StopGradient), *ALL),
    "argmax": case(lm(model=ArgmaxRouted), *ALL),
    "class_token": case(
        Classified, *QKVO, *PAIR, "wte.weight", "head.*", batch=class_labels, objective=class_objective, loss=class_loss
    ),
    "conv_stem": case(
        ConvStem,
        *(*QKVO, *PAIR, "head.*"),
        batch=images,
        objective=lambda model, batch: class_loss(model(batch["image"]), batch["labels"]),
        loss=class_loss,
    ),
    "encoder": case(
        Encoder, "*.in_proj_*", "*.out_proj.weight", "*.linear1.*", "*.linear2.weight", "wte.weight", "head.*"
    ),
    "encoder_norm_first": case(
        partial(Encoder, norm_first=True),
        *("*.in_proj_*", "*.out_proj.weight", "*.linear1.*", "*.linear2.weight", "wte.weight", "head.*"),
    ),
    "regression": case(Regression, *PAIR, batch=vectors, objective=lambda m, b: m(**b), loss=None),
    "hand_mse": case(HandMse, *PAIR, batch=vectors, objective=lambda m, b: m(**b), loss=None),
    "unnumbered": case(Unnumbered, *ALL, "head.bias"),
    "constants": case(Constants, *ALL),
    "cpu_constants": case(CpuConstants, *ALL),
    "extra_term": case(
        lm(model=ExtraTerm), *QKVO, *PAIR, "wte.weight", batch=even_tokens, objective=own_loss, loss=None
    ),
    "two_heads": case(TwoHeads, *ALL, "other.*", batch=even_tokens, objective=own_loss, loss=None),
    "smoothed": case(
        lm(model=SmoothedLoss), *QKVO, *PAIR, "wte.weight", batch=even_tokens, objective=own_loss, loss=None
    ),
    "summed": case(lm(model=SummedLoss), *ALL, objective=own_loss, loss=None),
    "per_token": case(lm(model=PerTokenLoss), *ALL, objective=own_loss, loss=None),
    "channel_loss": case(lm(model=ChannelLoss), *QKVO, *PAIR, "wte.weight", objective=own_loss, loss=None),
    "log_prob_loss": case(lm(model=LogProbLoss), *QKVO, *PAIR, "wte.weight", objective=own_loss, loss=None),
    # four layers, for more stages
    "gpt2_4": case(gpt2(layers=4), *GPT),
    "gpt2_4_untied": case(gpt2(layers=4, tied=False, vocab_size=30), *GPT, "lm_head.weight", vocab=30),
    "u_net": case(lm(model=UNet, layers=4), *ALL),
    "stop_gradient_4": case(lm(model=StopGradient, layers=4), *ALL),
    "argmax_4": case(lm(model=ArgmaxRouted, layers=4), *ALL),
    "own_loss_4": case(lm(model=partial(OwnLoss, "dict"), layers=4, tied=True), *ALL, objective=own_loss, loss=None),
    "relative_bias_4": case(partial(RelativeBias, layers=4), *ALL, "table.weight"),
    "twice_4": case(lm(model=Twice, layers=4), *ALL),
}
