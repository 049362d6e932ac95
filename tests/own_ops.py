"""A model with operators of its own, as a user would write it: each with its backward and its rule beside it.

`squash` works entry by entry, `centre` needs one dim whole.
"""

import torch
from torch import Tensor, nn

import meg_compile

DIM, FFN = 16, 32


@torch.library.custom_op("own_ops::squash", mutates_args=())
def squash(x: Tensor, width: float) -> Tensor:
    """x / (width + |x|)."""
    return x / (width + x.abs())


@squash.register_fake
def _(x, width):
    return torch.empty_like(x)


def _keep_x(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.width = inputs[1]


def _squash_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * ctx.width / (ctx.width + x.abs()) ** 2, None


squash.register_autograd(_squash_backward, setup_context=_keep_x)


@meg_compile.rule("own_ops::squash")
def squash_rule(op, x, width):
    """Entry by entry: the result has the axes of x, and none is needed whole."""
    return x


@torch.library.custom_op("own_ops::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """x less its mean over the last dim."""
    return x - x.mean(-1, keepdim=True)


@centre.register_fake
def _(x):
    return torch.empty_like(x)


centre.register_autograd(lambda ctx, grad: grad - grad.mean(-1, keepdim=True))


@meg_compile.rule("own_ops::centre")
def centre_rule(op, x):
    """A mean over part of the last dim would be another one."""
    op.whole(x[-1], "takes a mean over it")
    return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)

    def forward(self, x):
        return x + self.fc2(squash(self.fc1(centre(x)), 1.5))


class Net(nn.Module):
    """ids [B, T] -> logits [B, T, vocab]."""

    def __init__(self, vocab: int = 256):
        super().__init__()
        self.emb = nn.Embedding(vocab, DIM)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(DIM, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
        return self.out(centre(x))
