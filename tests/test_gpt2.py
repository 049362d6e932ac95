"""The plain GPT-2: sizes as published, layouts and tie as promised, and one forward spelt out in plain algebra."""

import math

import pytest
import torch
import torch.nn.functional as F

from meg_compile.models.gpt2 import GPT2, QKV_LAYOUTS
from meg_compile.models.loss import cross_entropy

TINY = {"vocab_size": 61, "context": 16, "layers": 2, "hidden": 24, "heads": 3}


def tiny(**options) -> GPT2:
    torch.manual_seed(0)
    return GPT2(**TINY | options).double()


def num_parameters(**sizes) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT2(**sizes).parameters())


def closed_form(vocab_size, context, layers, hidden, heads, tied=True) -> int:
    """Embeddings, 12 C^2 + 13 C a block (qkv 3, output 1, MLP 8; 9 C biases, 4 C norms), last norm, untied head."""
    block = 12 * hidden**2 + 13 * hidden
    return (vocab_size * (1 if tied else 2) + context) * hidden + layers * block + 2 * hidden


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "published"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_gpt2_sizes_are_the_published_ones(layers, hidden, heads, published):
    sizes = {"vocab_size": 50257, "context": 1024, "layers": layers, "hidden": hidden, "heads": heads}
    assert num_parameters(**sizes) == closed_form(**sizes) == published


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "context", "vocab_size", "published", "last_digit"),
    [
        (40, 1536, 16, 1024, 51200, 1.2e9, 1e8),  # Megatron-LM, table 1
        (54, 1920, 20, 1024, 51200, 2.5e9, 1e8),
        (64, 2304, 24, 1024, 51200, 4.2e9, 1e8),
        (72, 3072, 32, 1024, 51200, 8.3e9, 1e8),
        (96, 12288, 96, 2048, 50257, 175e9, 1e9),  # GPT-3, table 2.1
    ],
)
def test_paper_sizes_round_to_the_published_ones(layers, hidden, heads, context, vocab_size, published, last_digit):
    sizes = {"vocab_size": vocab_size, "context": context, "layers": layers, "hidden": hidden, "heads": heads}
    count = num_parameters(**sizes)
    assert count == closed_form(**sizes)
    assert round(count / last_digit) == round(published / last_digit)


def test_an_untied_head_is_a_weight_of_its_own():
    assert num_parameters(**TINY, tied=False) == closed_form(**TINY, tied=False)
    tied, untied = tiny(), tiny(tied=False)
    assert tied.lm_head.weight is tied.wte.weight
    assert not torch.equal(untied.lm_head.weight, untied.wte.weight)
    assert tied.state_dict().keys() == untied.state_dict().keys()


def test_parameter_names_are_hugging_faces():
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    modules = {name.rpartition(".")[0] for name in tiny().state_dict()}
    assert modules == {
        "wte",
        "wpe",
        "ln_f",
        "lm_head",
        *(f"h.{i}.{name}" for i in range(2) for name in block),
    }


def test_initialisation():
    torch.manual_seed(0)
    parameters = dict(GPT2(vocab_size=500, context=100, layers=8, hidden=96, heads=4).named_parameters())
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


def forward_by_hand(model: GPT2, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence, head by head and without a fused kernel. ids [T]; result [T, V]."""
    heads, size = 3, 8
    x = model.wte.weight[ids] + model.wpe.weight[: len(ids)]
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for block in model.h:
        qkv = block.attn.c_attn(block.ln_1(x))
        outputs = []
        for head in range(heads):
            if model.h[0].attn.qkv_layout == "per_head":
                starts = [(3 * head + part) * size for part in range(3)]
            else:
                starts = [part * heads * size + head * size for part in range(3)]
            q, k, v = (qkv[:, start : start + size] for start in starts)
            scores = (q @ k.T / math.sqrt(size)).masked_fill(~causal, -math.inf)
            outputs.append(scores.softmax(-1) @ v)
        x = x + block.attn.c_proj(torch.cat(outputs, dim=-1))
        h = block.mlp.c_fc(block.ln_2(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + block.mlp.c_proj(h)
    return model.ln_f(x) @ model.lm_head.weight.T


@pytest.mark.parametrize("qkv_layout", QKV_LAYOUTS)
def test_forward_equals_plain_algebra(qkv_layout):
    model = tiny(qkv_layout=qkv_layout)
    ids = torch.randint(0, 61, (2, 16))
    by_hand = torch.stack([forward_by_hand(model, row) for row in ids])
    torch.testing.assert_close(model(ids), by_hand, rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_only():
    model = tiny(dropout=0.5)
    ids = torch.randint(0, 61, (2, 16))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "hidden=24 does not divide into heads=5"),
        ({"qkv_layout": "thrids"}, "thirds, stacked, per_head"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_a_sequence_over_the_context_is_refused():
    with pytest.raises(ValueError, match="17 tokens does not fit in the model's context of 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


def test_cross_entropy_is_the_mean_over_counted_labels():
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 6], [-100, 0, -100]])
    counted = [(0, 0), (0, 2), (1, 1)]
    expected = -sum(F.log_softmax(logits[at], -1)[labels[at]] for at in counted) / 3
    torch.testing.assert_close(cross_entropy(logits, labels), expected)
    zeros_ignored = cross_entropy(logits, torch.tensor([[1, 0, 6], [0, 0, 0]]), ignore_index=0)
    torch.testing.assert_close(zeros_ignored, cross_entropy(logits, torch.tensor([[1, -100, 6], [-100] * 3])))
