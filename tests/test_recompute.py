"""Recomputation keeps less and changes nothing: gradients are the same to the last bit."""

import pytest
import torch
import torch.nn.functional as F
from held import holding, looking_into_regather
from models import FixedRows
from torch import Tensor, nn
from training import config, on_ranks

from meg_compile.models.gpt2 import GPT2
from meg_compile.train.batches import batches_of


class Softmax(nn.Module):
    """Attention written out: product, mask, softmax, dropout, product."""

    def __init__(self, d: int, heads: int, p: float):
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        shares = F.dropout(scores.masked_fill(~causal, -torch.inf).softmax(-1), self.p, self.training)
        return self.out((shares @ v).transpose(1, 2).reshape(b, t, d))


class WrittenOut(nn.Module):
    def __init__(self, p: float = 0.0):
        super().__init__()
        self.emb = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(16), Softmax(16, 4, p), nn.Linear(16, 32), nn.Linear(32, 16)]) for _ in range(4)
        )
        self.head = nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for norm, attention, up, down in self.blocks:
            x = x + attention(norm(x))
            x = x + down(F.gelu(up(x)))
        return self.head(x)


def step(factory, **plan):
    """(bytes kept for backward, loss, whole gradients) of one step, as rank 0 sees them.

    Dropout draws by counters, with one rank from torch's generator, which threads would share.
    """
    changes = {f"plan__{key}": value for key, value in plan.items()}
    settings = config(train__micro_batch_size=4, dropout="exact" if "tp" in plan or "pp" in plan else "fast", **changes)

    def work(program, executor, groups):
        torch.manual_seed(7)
        batch = batches_of(settings, FixedRows(), groups.mesh.dp, groups.coords.dp)[0]
        batch = program.keyed(batch, 7, 0, list(range(8)))
        with holding([*executor.tensors.values(), *executor.copies.values()]) as held:
            loss = executor.run(batch, 1.0)
        executor.reduce_gradients()
        return held.peak, loss, dict(executor.gather("grad"))

    with looking_into_regather():
        return on_ranks(settings, work, factory)[0]


def gpt2(dropout: float):
    return lambda: GPT2(vocab_size=64, context=12, layers=4, hidden=16, heads=4, dropout=dropout)


def written_out(dropout: float):
    return lambda: WrittenOut(dropout)


@pytest.mark.parametrize("model", [gpt2, written_out])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zbv_zero_bubble", "sp": True},
    ],
    ids=str,
)
def test_gradients_are_equal_to_the_bit_and_less_is_kept(model, plan):
    factory = model(0.3)
    kept, loss, grads = step(factory, **plan)
    sizes = [kept]
    for recompute in ({"recompute": "selective"}, {"recompute": "full", "recompute_every": 2}, {"recompute": "full"}):
        less, same_loss, same_grads = step(factory, **plan, **recompute)
        assert same_loss == loss
        for name, grad in grads.items():
            assert torch.equal(same_grads[name], grad), (recompute, name)
        sizes.append(less)
    if model is written_out or plan:  # torch's own attention keeps no weights on the CPU
        assert sizes[1] < sizes[0]
    assert sizes[3] <= sizes[2] < sizes[0]
