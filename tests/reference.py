"""Right numbers for the models of `models.py`, and the plain one-process training that gives them.

Each row is (loss, gradient norm before the step) of one step: model built after `torch.manual_seed(1234)` in float32
and widened to float64, global batch s = `fixed_batch(s)`, SGD with lr 0.1, loss = mean over all tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import fixed_batch
from torch import nn

SEED = 1234

TINY_GPT = [
    (11.1506565856, 4.1771919503),
    (9.7424968977, 4.0747527864),
    (8.9230111609, 3.7249363182),
    (7.4430283349, 3.406054166),
    (6.9973621078, 2.9133472982),
]
TINY_GPT_WEIGHTS = 2743.66961822  # sum of |w| over all parameters, the tied one once, after the 5 steps
TINY_GPT_NUM_PARAMETERS = 14688

TINY_GPT_5_LAYERS = [
    (11.2074336592, 4.5701729279),
    (9.6531806017, 4.5637411201),
    (8.4997448596, 4.0437706746),
]
TINY_GPT_7_LAYERS = [(11.3163810141, 5.182609287), (9.2179620233, 5.2964854697), (7.7168500133, 3.7323799785)]

ZERO_HEAD_GPT_VOCAB_101 = [  # fixed_batch draws from a vocabulary of 101 here; the first loss is ln 101
    (4.6151205168, 0.4030423883),
    (4.6154741364, 0.4265616047),
    (4.6140709796, 0.4049641562),
    (4.6130671004, 0.4064801471),
    (4.6159636978, 0.4115836053),
]

WRAPPED_BIG_BIAS = [(4.2789111115, 0.366861887), (4.3367688441, 0.3991431836), (4.1804196567, 0.3192324226)]
BIG_BIAS_MEAN = 99.9685398243016  # mean output for `big_bias_input()`; one bias too many gives 199.97

DICT_NET_LOSS_WITH_MASK = 4.51975863431393  # first batch of MaskedRows(masked=3)
DICT_NET_LOSS_NO_MASK = 4.539927682137428  # first batch of MaskedRows(masked=0), mask left out


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(SEED)
    return factory().double()


def big_bias_input() -> torch.Tensor:
    return torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def plain_run(factory: Callable[[], nn.Module], steps: int, vocab: int = 64, lr: float = 0.1):
    """(rows of (loss, gradient norm), the trained model)."""
    model = build(factory)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    rows = []
    for step in range(steps):
        ids, labels = fixed_batch(step, vocab=vocab)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        rows.append((loss.item(), norm.item()))
    return rows, model
