"""Random programs, for tests that a compilation is never wrong whatever the model does.

`RandomModel(seed)` draws a list of steps, each a small function of earlier values and of parameters of its own, and
puts them into numbered blocks. Most steps come from what models do between Linears (views, splits, rotations,
softmaxes, norms, residuals); some are there because they trap a compiler (mixing over an axis twice, cutting it
unevenly, scans).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, WIDTH, VOCAB = 4, 4, 16, 24
LARGEST = 6000  # entries of a value; a step that makes a larger one is not kept

Step = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass
class Call:
    """One step of a program: function(*values, *parameters) -> a new value, or several."""

    name: str
    function: Step
    values: list[int]
    params: list[str]


class Block(nn.Module):
    """Some steps in a row, with the parameters that they read."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def forward(self, live: list[Tensor]) -> list[Tensor]:
        live = list(live)
        for call in self.calls:
            out = call.function(*(live[i] for i in call.values), *(getattr(self, name) for name in call.params))
            live += [out] if isinstance(out, Tensor) else out
        return live


class RandomModel(nn.Module):
    """Ids [B, T] and labels [B, T] to a loss. The same seed gives the same program and, from one generator, weights."""

    def __init__(self, seed: int, blocks: int = 2, steps: int = 8):
        super().__init__()
        draw = random.Random(seed)
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.h = nn.ModuleList(Block() for _ in range(blocks))
        with torch.device("cpu"):
            _Author(self, draw).write(steps)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        live = [F.embedding(input_ids, self.table)]
        for block in self.h:
            live = block(live)
        logits = F.linear(live[self.last].reshape(-1, live[self.last].shape[-1]), self.head, self.head_bias)
        loss = F.cross_entropy(logits[: labels.numel()], labels.flatten()[: len(logits)])
        for i, weight in self.extra:
            loss = loss + weight * live[i].tanh().mean()
        return loss

    def describe(self) -> str:
        lines = [f"{b}: {c.name}({c.values}, {c.params})" for b, block in enumerate(self.h) for c in block.calls]
        return "\n".join([*lines, f"head of {self.last}, extra {self.extra}"])


class _Author:
    """Draws steps, and runs each once on example values to learn the shapes that follow."""

    def __init__(self, model: RandomModel, draw: random.Random):
        self.model, self.draw = model, draw
        self.shapes = [(BATCH, SEQ, WIDTH)]
        self.floats = [0]
        self.block: Block = model.h[0]
        self.num_params = 0

    def write(self, steps: int) -> None:
        model, draw = self.model, self.draw
        for block in model.h:
            self.block = block
            for _ in range(steps):
                self.step()
            if draw.random() < 0.7:
                self.residual()
        model.last = draw.choice(self.floats[-3:])
        model.head = nn.Parameter(torch.randn(VOCAB, self.shapes[model.last][-1]) * 0.3)
        model.head_bias = nn.Parameter(torch.randn(VOCAB)) if draw.random() < 0.5 else None
        kept = [] if draw.random() < 0.4 else draw.sample(self.floats, min(2, len(self.floats)))
        model.extra = [(i, draw.choice([0.5, -1.0])) for i in kept]

    def step(self) -> None:
        pick = self.draw.choice(self.floats[-4:])
        name = self.draw.choice(_NAMES)
        _STEPS[name](self, pick)

    def residual(self) -> None:
        """Back to the residual stream's width, and add where shapes allow."""
        i = self.floats[-1]
        self.linear(i, WIDTH)
        same = [j for j in self.floats[:-1] if self.shapes[j] == self.shapes[-1]]
        if same:
            self.add("residual", torch.add, [len(self.shapes) - 1, self.draw.choice(same)])

    def param(self, *shape: int, scale: float = 0.4) -> str:
        name = f"p{self.num_params}"
        self.num_params += 1
        self.block.register_parameter(name, nn.Parameter(torch.randn(*shape) * scale))
        return name

    def add(self, name: str, function: Step, values: list[int], params: list[str] = ()) -> None:
        """Keep a step, unless what it makes is empty, too large or too deep."""
        examples = [torch.full(self.shapes[i], 0.5) for i in values]
        weights = [torch.full(tuple(getattr(self.block, p).shape), 0.5) for p in params]
        out = function(*examples, *weights)
        outs = [out] if isinstance(out, Tensor) else list(out)
        if all(1 < v.numel() <= LARGEST and 1 <= v.dim() <= 6 for v in outs):
            self.block.calls.append(Call(name, function, values, list(params)))
            for value in outs:
                self.floats.append(len(self.shapes))
                self.shapes.append(tuple(value.shape))
        else:
            for p in params:
                delattr(self.block, p)

    def same_shape(self, i: int) -> int:
        return self.draw.choice([j for j in self.floats if self.shapes[j] == self.shapes[i]])

    def dim(self, i: int) -> tuple[int, int]:
        d = self.draw.randrange(len(self.shapes[i]))
        return d, self.shapes[i][d]

    # linear maps

    def linear(self, i: int, out: int | None = None) -> None:
        out = out or self.draw.choice([8, 12, 16, 16, 24, 32])
        params = [self.param(out, self.shapes[i][-1])] + [self.param(out)] * (self.draw.random() < 0.6)
        self.add("linear", F.linear, [i], params)

    def pair(self, i: int) -> None:
        """A pair with something random and shape-keeping between."""
        inner = self.draw.choice([16, 16, 24, 32])
        self.linear(i, inner)
        for _ in range(self.draw.randrange(1, 4)):
            self.draw.choice(
                [_Author.unary, _Author.gain, _Author.rotate, _Author.positions, _Author.softmax, _Author.rms]
            )(self, len(self.shapes) - 1)
        self.linear(len(self.shapes) - 1, self.shapes[i][-1])

    def gated(self, i: int) -> None:
        width, inner = self.shapes[i][-1], self.draw.choice([8, 16, 12])
        joined = self.draw.random() < 0.5

        def function(x, w1, w2, w3=None):
            gate, up = F.linear(x, w1).chunk(2, -1) if joined else (F.linear(x, w1), F.linear(x, w3))
            return F.linear(torch.sigmoid(gate) * up, w2)

        params = [self.param(inner * (1 + joined), width), self.param(width, inner)]
        self.add("gated", function, [i], params if joined else [*params, self.param(inner, width)])

    def attention(self, i: int) -> None:
        if len(self.shapes[i]) != 3 or self.shapes[i][-1] % 4:
            return self.linear(i, WIDTH)
        b, t, c = self.shapes[i]
        layout, heads = self.draw.choice(["thirds", "stacked", "per_head"]), self.draw.choice([2, 4, 4])
        causal, manual = self.draw.random() < 0.5, self.draw.random() < 0.5
        normed = self.draw.random() < 0.3

        def function(x, w, bias, o, g):
            y = F.linear(x, w, bias)
            if layout == "thirds":
                q, k, v = (z.view(b, t, heads, c // heads) for z in y.split(c, -1))
            elif layout == "stacked":
                q, k, v = y.view(b, t, 3, heads, c // heads).unbind(2)
            else:
                q, k, v = y.view(b, t, heads, 3, c // heads).unbind(3)
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            if normed:
                q = F.layer_norm(q, q.shape[-1:], g)
            if manual:
                scores = q @ k.mT * 0.3
                if causal:
                    mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
                    scores = scores.masked_fill(~mask, float("-inf"))
                z = scores.softmax(-1) @ v
            else:
                z = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return F.linear(z.transpose(1, 2).reshape(b, t, c), o)

        params = [self.param(3 * c, c), self.param(3 * c), self.param(c, c), self.param(c // heads)]
        self.add(f"attention {layout} {heads} causal={causal} manual={manual} {normed}", function, [i], params)

    def einsum(self, i: int) -> None:
        shape = self.shapes[i]
        letters = "abcdef"[: len(shape)]
        gone = self.draw.sample(range(len(shape)), self.draw.choice([1, 1, 2]) if len(shape) > 1 else 1)
        new = self.draw.choice([[8], [4, 6], [16], []])
        weight = [letters[d] for d in gone] + [*"xyz"[: len(new)]]
        sizes = [shape[d] for d in gone] + new
        order = self.draw.sample(range(len(weight)), len(weight))
        kept = [c for c in letters if c not in weight] + [*"xyz"[: len(new)]]
        if not kept:
            return
        self.draw.shuffle(kept)
        equation = f"{letters},{''.join(weight[o] for o in order)}->{''.join(kept)}"
        self.add(equation, lambda x, w: torch.einsum(equation, x, w), [i], [self.param(*(sizes[o] for o in order))])

    def addmm(self, i: int) -> None:
        shape = self.shapes[i]
        params = [self.param(12), self.param(shape[-1], 12)]
        self.add(
            "addmm", lambda x, b, w: torch.addmm(b, x.reshape(-1, shape[-1]), w).view(*shape[:-1], 12), [i], params
        )

    def shared_weight(self, i: int) -> None:
        """One matrix forward and transposed."""
        params = [self.param(16, self.shapes[i][-1])]
        self.add("mirror", lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), [i], params)

    def low_rank(self, i: int) -> None:
        c = self.shapes[i][-1]
        params = [self.param(16, c), self.param(4, c), self.param(16, 4)]
        self.add("low rank", lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x, a), b), [i], params)

    # entry by entry

    def unary(self, i: int) -> None:
        functions = [torch.tanh, F.gelu, torch.sin, F.silu, torch.relu, lambda x: x * 0.5 + 1, lambda x: x.clamp(-1, 1)]
        self.add("unary", self.draw.choice(functions), [i])

    def binary(self, i: int) -> None:
        self.add("binary", self.draw.choice([torch.mul, torch.add, torch.sub]), [i, self.same_shape(i)])

    def gain(self, i: int) -> None:
        shape = self.shapes[i][self.draw.randrange(len(self.shapes[i])) :]
        shape = [n if self.draw.random() < 0.7 else 1 for n in shape]
        self.add("gain", self.draw.choice([torch.mul, torch.add]), [i], [self.param(*shape)])

    def positions(self, i: int) -> None:
        d, n = self.dim(i)
        view = [n if e == d else 1 for e in range(len(self.shapes[i]))]
        self.add("positions", lambda x: x * (torch.arange(n, device=x.device).view(view) * 0.1 + 1), [i])

    def masked(self, i: int) -> None:
        n = self.shapes[i][-1]
        self.add("masked", lambda x: x.masked_fill(torch.arange(n, device=x.device) < 2, 0.1), [i])

    def where(self, i: int) -> None:
        j = self.same_shape(i)
        self.add("where", lambda x, y: torch.where(x > y, x, 0.5 * y), [i, j])

    def detached(self, i: int) -> None:
        self.add("detached", lambda x, y: x + y.detach() * 0.3, [i, self.same_shape(i)])

    def constant_gain(self, i: int) -> None:
        shape = self.shapes[i]
        self.add("ones", lambda x: x + torch.ones(shape, device=x.device, dtype=x.dtype) * 0.5, [i])

    # shapes

    def view(self, i: int) -> None:
        d, n = self.dim(i)
        factors = [f for f in range(2, n) if n % f == 0]
        if factors:
            f, s = self.draw.choice(factors), self.shapes[i]
            self.add("view", lambda x: x.reshape(*s[:d], f, n // f, *s[d + 1 :]), [i])

    def merge(self, i: int) -> None:
        s = self.shapes[i]
        if len(s) > 1:
            d = self.draw.randrange(len(s) - 1)
            self.add("merge", lambda x: x.flatten(d, d + 1), [i])

    def permute(self, i: int) -> None:
        order = self.draw.sample(range(len(self.shapes[i])), len(self.shapes[i]))
        self.add("permute", lambda x: x.permute(order), [i])

    def transpose(self, i: int) -> None:
        a, b = self.dim(i)[0], self.dim(i)[0]
        self.add("transpose", lambda x: x.transpose(a, b), [i])

    def reshape_all(self, i: int) -> None:
        """To a shape that need not keep any axis."""
        b, *rest = self.shapes[i]
        n = torch.Size(rest).numel()
        widths = [w for w in (4, 6, 8, 12, 16, 24) if n % w == 0]
        if widths:
            w = self.draw.choice(widths)
            self.add("reshape", lambda x: x.reshape(b, n // w, w), [i])

    def expand(self, i: int) -> None:
        d, _ = self.dim(i)
        s = self.shapes[i]
        self.add("expand", lambda x: x.unsqueeze(d).expand(*s[:d], 4, *s[d:]), [i])

    def repeat_interleave(self, i: int) -> None:
        d, _ = self.dim(i)
        self.add("repeat_interleave", lambda x: x.repeat_interleave(2, d), [i])

    def repeat(self, i: int) -> None:
        d, _ = self.dim(i)
        times = [2 if e == d else 1 for e in range(len(self.shapes[i]))]
        self.add("repeat", lambda x: x.repeat(times), [i])

    # pieces

    def split(self, i: int) -> None:
        d, n = self.dim(i)
        if n > 2:
            a = self.draw.choice([self.draw.randrange(1, n), n // 2])
            self.add("split", lambda x: x.split([a, n - a], d), [i])

    def rotate(self, i: int) -> None:
        d, n = self.dim(i)
        if n % 2 == 0:

            def function(x):
                left, right = x.narrow(d, 0, n // 2), x.narrow(d, n // 2, n // 2)
                return torch.cat([-right, left], d) * 0.5 + x

            self.add("rotate", function, [i])

    def interleaved_rotate(self, i: int) -> None:
        n = self.shapes[i][-1]
        if n % 2 == 0:
            self.add("pairs", lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2), [i])

    def slice(self, i: int) -> None:
        d, n = self.dim(i)
        if n > 2:
            start = self.draw.randrange(n - 1)
            length = self.draw.randrange(1, n - start + 1)
            self.add("slice", lambda x: x.narrow(d, start, length), [i])

    def stride(self, i: int) -> None:
        d, n = self.dim(i)
        start, step = self.draw.randrange(2), self.draw.choice([2, 2, 3])
        if n > step:
            at = (slice(None),) * d + (slice(start, None, step),)
            self.add("stride", lambda x: x[at], [i])

    def cat(self, i: int) -> None:
        d, _ = self.dim(i)
        s = self.shapes[i]
        fits = [j for j in self.floats if len(self.shapes[j]) == len(s)]
        fits = [j for j in fits if self.shapes[j][:d] + self.shapes[j][d + 1 :] == s[:d] + s[d + 1 :]]
        self.add("cat", lambda x, y: torch.cat([x, y], d), [i, self.draw.choice(fits)])

    def cat_param(self, i: int) -> None:
        d, _ = self.dim(i)
        shape = [2 if e == d else 1 for e in range(len(self.shapes[i]))]
        wide = [2 if e == d else n for e, n in enumerate(self.shapes[i])]
        self.add("cat param", lambda x, p: torch.cat([p.expand(wide), x], d), [i], [self.param(*shape)])

    def stack(self, i: int) -> None:
        d, _ = self.dim(i)
        self.add("stack", lambda x: torch.stack([x, x * 2], d), [i])

    def select(self, i: int) -> None:
        d, n = self.dim(i)
        at = self.draw.randrange(n)
        if len(self.shapes[i]) > 1:
            self.add("select", lambda x: x.select(d, at), [i])

    def unbind(self, i: int) -> None:
        d, n = self.dim(i)
        if len(self.shapes[i]) > 1 and n < 5:
            self.add("unbind", lambda x: x.unbind(d), [i])

    def pick(self, i: int) -> None:
        d, n = self.dim(i)
        at = (slice(None),) * d
        self.add("pick", lambda x: x[(*at, torch.tensor([0, n - 1, 0], device=x.device))], [i])

    def pad(self, i: int) -> None:
        self.add("pad", lambda x: F.pad(x, (1, 3)), [i])

    # over an axis

    def softmax(self, i: int) -> None:
        d, _ = self.dim(i)
        self.add("softmax", lambda x: x.softmax(d), [i])

    def norm(self, i: int) -> None:
        n = self.shapes[i][-1]
        params = [self.param(n), self.param(n)]
        self.add("norm", lambda x, w, b: F.layer_norm(x, (n,), w, b), [i], params)

    def rms(self, i: int) -> None:
        d, _ = self.dim(i)
        self.add("rms", lambda x: x * torch.rsqrt(x.square().mean(d, keepdim=True) + 0.1), [i])

    def reduce(self, i: int) -> None:
        d, _ = self.dim(i)
        keep, function = self.draw.random() < 0.5, self.draw.choice([torch.sum, torch.mean, torch.amax])
        if len(self.shapes[i]) > 1:
            self.add(f"reduce {function.__name__}", lambda x: function(x, d, keepdim=keep) * 0.3, [i])

    def centred(self, i: int) -> None:
        d, _ = self.dim(i)
        self.add("centred", lambda x: x - x.mean(d, keepdim=True), [i])

    def scan(self, i: int) -> None:
        d, _ = self.dim(i)
        functions = [
            lambda x: x.cumsum(d) * 0.2,
            lambda x: x.flip(d) + x,
            lambda x: x.roll(1, d),
            lambda x: x * (x.var(d, False, True) + 0.1).sqrt(),
        ]
        self.add("scan", self.draw.choice(functions), [i])

    def scores(self, i: int) -> None:
        if len(self.shapes[i]) > 1:
            self.add("scores", lambda x, y: (x @ y.mT * 0.2).tanh(), [i, self.same_shape(i)])

    def gram(self, i: int) -> None:
        if len(self.shapes[i]) > 1:
            self.add("gram", lambda x, y: (x.mT @ y * 0.2).tanh(), [i, self.same_shape(i)])

    def mix(self, i: int) -> None:
        s = self.shapes[i]
        fits = [j for j in self.floats if len(s) > 1 and self.shapes[j][:-1] == (*s[:-2], s[-1])]
        if fits:
            self.add("mix", lambda x, y: x @ y * 0.3, [i, self.draw.choice(fits)])

    def attend(self, i: int) -> None:
        """Attention between earlier values, whatever their axes are."""
        s = self.shapes[i]
        if len(s) in (3, 4):
            j = self.same_shape(i)
            self.add("attend", lambda x, y: F.scaled_dot_product_attention(x, y, y), [i, j])


_NAMES = """linear linear linear pair pair pair gated gated attention attention attention einsum einsum addmm
    shared_weight low_rank unary unary binary gain gain positions masked where detached constant_gain view view view
    merge merge permute transpose reshape_all expand repeat_interleave repeat split rotate interleaved_rotate slice
    stride cat cat_param stack select unbind pick pad softmax norm rms reduce reduce centred scan scores gram mix
    attend""".split()
_STEPS = {name: getattr(_Author, name) for name in _NAMES}
