"""GPT-2 under every plan: the compiled run is the plain one in float64, whatever the qkv layout or the micro-batch."""

from functools import partial
from itertools import product

import pytest
from models import FixedRows
from training import config, on_ranks

from meg_compile.models.gpt2 import GPT2, QKV_LAYOUTS
from meg_compile.models.loss import cross_entropy
from meg_compile.verify import verify

PLANS = [  # tp, pp, dp
    (1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2),
]  # fmt: skip

EVERY = list(product(QKV_LAYOUTS, (True, False)))
MODELS = {1: EVERY[:2], 2: EVERY[2:4], 4: EVERY[4:]}  # every plan meets every model, and every micro-batch size


@pytest.mark.parametrize("micro_batch_size", MODELS)
@pytest.mark.parametrize(("tp", "pp", "dp"), PLANS)
def test_gpt2_trains_as_the_plain_model(tp, pp, dp, micro_batch_size):
    """Two steps of AdamW with clipping; float64 rounding of sums in another order stays far under 1e-9."""
    settings = config(
        plan__tp=tp,
        plan__pp=pp,
        plan__dp=dp,
        train__micro_batch_size=micro_batch_size,
        train__global_batch_size=16,
        train__clip_grad=1.0,
        optim__name="adamw",
        optim__lr=1e-2,
        optim__weight_decay=0.1,
    )
    for qkv_layout, tied in MODELS[micro_batch_size]:
        factory = partial(
            GPT2, vocab_size=64, context=12, layers=4, hidden=16, heads=4, tied=tied, qkv_layout=qkv_layout
        )

        def work(program, executor, groups, factory=factory):
            if tp > 1:
                assert program.params["h.0.attn.c_attn.weight"].local_numel == 48 * 16 // tp
            return verify(settings, program, executor, groups, factory, cross_entropy, FixedRows(), steps=2)

        report = on_ranks(settings, work, factory)[0]
        assert report.ok, (qkv_layout, tied, report.worst())
        assert max(difference.error for difference in report.differences) < 1e-9
