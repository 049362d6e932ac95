"""Starting weights from a tape: bit-equal to the plain build, whatever the constructor does."""

import copy
import random

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from threads import run_threads
from torch import nn

from meg_compile.models.gpt2 import GPT2
from meg_compile.runtime.init import from_module, record


def keep_whole(name):
    return lambda whole: whole


def build_plain(factory, seed):
    """Every tensor of the plain build by name, and the generator state after it."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module = factory()
    names = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return names, torch.get_rng_state()


def assert_bit_equal(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def assert_same_start(factory, seed=7, other_seed=None):
    """Record, replay and compare; returns the recorded module and the tape."""
    want, after = build_plain(factory, seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    module, tape = record(factory)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(seed + 1)
    assert_bit_equal(dict(tape.replay(keep_whole)), want)
    assert torch.equal(torch.get_rng_state(), after)
    if tape.whole is None:
        assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    return module, tape


class Small(nn.Module):
    """A module whose constructor is the function under test."""

    def __init__(self, fill):
        super().__init__()
        fill(self)


def xavier(module):
    for _, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return module


def scaled(self):
    """Fresh draws, changed in place through views, .data and no_grad."""
    self.a = nn.Linear(6, 9)
    self.b = nn.Parameter(torch.randn(5, 7) * 0.02)
    with torch.no_grad():
        self.a.weight[:3] *= 0.5
        self.a.weight[3:6].normal_(std=0.1)
        self.a.bias.data.zero_()[2:].fill_(3)
    self.a.weight.data.mul_(self.b.data.abs().mean()).add_(torch.ones(9, 1))


def initialisers(self):
    for index, init in enumerate(
        [
            nn.init.orthogonal_,
            nn.init.trunc_normal_,
            nn.init.kaiming_normal_,
            nn.init.kaiming_uniform_,
            nn.init.xavier_normal_,
            nn.init.eye_,
            nn.init.ones_,
            lambda w: nn.init.sparse_(w, 0.3),
        ]
    ):
        setattr(self, f"w{index}", nn.Parameter(torch.empty(17, 11)))
        init(getattr(self, f"w{index}"))


def buffers(self):
    self.embedding = nn.Embedding(11, 5, padding_idx=2)
    self.norm = nn.BatchNorm1d(5)
    self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
    self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
    self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    position = torch.arange(6).unsqueeze(1)
    table = torch.zeros(6, 4)
    table[:, 0::2] = torch.sin(position * self.inverse[:2])
    table[:, 1::2] = torch.FloatTensor(np.cos(np.arange(12).reshape(6, 2)))
    self.positions = nn.Parameter(table, requires_grad=False)
    self.array = nn.Parameter(torch.from_numpy(np.random.rand(3)))
    self.array_too = nn.Parameter(torch.as_tensor(np.arange(4.0)) * torch.rand(4))


def tied(self):
    self.wte, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    self.head.weight = self.wte.weight
    self.copy = copy.deepcopy(self.head)
    nn.init.normal_(self.head.weight, std=0.02)
    fused = torch.randn(6, 4)
    self.q, self.k = nn.Parameter(fused[:3]), nn.Parameter(fused[3:])


def rates(self):
    """Values of tensors decide what is built."""
    self.rates = [rate for rate in torch.linspace(0, 0.3, 4).tolist()]
    self.layers = nn.ModuleList(nn.Linear(3, 3) for rate in self.rates if rate < 0.25)
    if torch.tensor([1.0, 2.0]).sum() > 2:
        self.extra = nn.Linear(3, int(torch.arange(5).max().item()))
    ones = (torch.arange(6) % 2 == 0).nonzero().flatten()
    self.picked = nn.Parameter(torch.rand(6)[ones] + ones.float().mean())


def draws_decide(self):
    """Values that depend on the generator decide what is built and where it stands afterwards."""
    self.first = nn.Linear(3, 3)
    for index in range(4):
        if torch.rand(()) < 0.5:
            setattr(self, f"layer{index}", nn.Linear(3, 2))
    order = torch.randperm(3).tolist()
    self.order = nn.Parameter(torch.randn(3)[torch.tensor(order)])


def generators(self):
    """Seeds, forks and goes back; Python's and NumPy's generators too."""
    self.a = nn.Linear(2, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        self.b = nn.Linear(2, 3)
    self.c = nn.Linear(2, 3)
    state = torch.get_rng_state()
    self.d = nn.Linear(2, 3)
    torch.set_rng_state(state)
    self.e = nn.Linear(2, 3)
    self.f = nn.Parameter(torch.full((3,), random.random() + np.random.rand()))
    torch.manual_seed(6)
    self.g = nn.Linear(2, 3)
    state = torch.get_rng_state()
    nn.Linear(2, 3)
    torch.set_rng_state(state)


def late_readers(self):
    """Values that are read before they are overwritten, by tensors that are finished only later."""
    base = torch.randn(20)
    early = base * 2
    base[:10].normal_()
    self.late = nn.Parameter(early + torch.randn(20))
    base.mul_(3)
    self.base = nn.Parameter(base)
    self.dropped = nn.Parameter(F.dropout(torch.ones(30), 0.4))
    unused = torch.rand(9).normal_()
    unused.add_(base.sum())
    F.dropout(unused, 0.5, inplace=True)
    self.mixed = nn.Parameter(torch.cat([torch.randn(3), base[:2]]).to(torch.bfloat16))


def default_dtype(self):
    outside = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    self.a = nn.Linear(4, 4)
    self.b = nn.Parameter(torch.arange(4) / 3 + torch.rand(4))
    torch.set_default_dtype(outside)
    self.c = nn.Linear(4, 4)


def devices(self):
    self.a = nn.Linear(4, 4, device="cpu").to("cpu")
    assert self.a.weight.device == torch.device("cpu") and not self.a.weight.is_meta
    self.b = nn.Parameter(torch.arange(3.0, device=self.a.weight.device).cpu())
    same = self.a.bias.data.to("cpu").cpu()
    same += 1  # a tensor that is on the CPU already is not copied
    self.c = nn.Parameter(self.a.weight.detach().cpu().to(torch.float64, copy=True))


RECORDED = {
    "gpt2": lambda: GPT2(64, 32, 3, 16, 4),
    "gpt2 untied": lambda: GPT2(64, 32, 2, 16, 4, tied=False, qkv_layout="per_head"),
    "gpt2 float64": lambda: GPT2(64, 32, 2, 16, 4).to(torch.float64),
    "tiny gpt": models.TinyGPT,
    "tiny gpt xavier": lambda: xavier(models.TinyGPT()),
    "transformer encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3, enable_nested_tensor=False
    ),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    **{
        fill.__name__: lambda fill=fill: Small(fill)
        for fill in (
            *(scaled, initialisers, buffers, tied, rates, draws_decide),
            *(generators, late_readers, default_dtype, devices),
        )
    },
}


@pytest.mark.parametrize("name", RECORDED)
def test_bit_equal_to_the_plain_build(name):
    _, tape = assert_same_start(RECORDED[name])
    assert tape.whole is None


@pytest.mark.parametrize("name", RECORDED)
def test_another_seed_than_that_of_the_recording(name):
    torch.manual_seed(0)
    random.seed(3)
    np.random.seed(3)
    _, tape = record(RECORDED[name])
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(11)
    plain = RECORDED[name]()
    want = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers(remove_duplicate=False))
    after = torch.get_rng_state()
    random.seed(3)
    np.random.seed(3)
    assert_bit_equal(dict(tape.replay(keep_whole, seed=11)), want)
    assert torch.equal(torch.get_rng_state(), after)


class Program(nn.Module):
    """A random constructor: draws, arithmetic, views, copies and in-place changes on a few tensors, in random order."""

    def __init__(self, seed, num_steps=40):
        super().__init__()
        choose = random.Random(seed)
        tensors = [torch.rand(4, 6) for _ in range(3)]
        for _ in range(num_steps):
            at = choose.randrange(len(tensors))
            x, y = tensors[at], choose.choice(tensors)
            part = choose.choice([x, x[:2], x[:, 1:4], x.t(), x.reshape(-1), x.reshape(2, 12)[1]])
            step = choose.randrange(14)
            if step < 4:
                part.normal_() if step < 2 else part.uniform_(-1, 1)
            elif step < 6:
                part.mul_(y.mean()) if step == 4 else part.add_(0.5)
            elif step < 8:
                x.copy_(y) if step == 6 else part.zero_()
            elif step < 10:
                tensors[at] = x * y if step == 8 else x.clone() + torch.randn(4, 6)
            elif step == 10:
                tensors.append(torch.empty_like(x).copy_(F.dropout(y, 0.3)))
            elif step == 11:
                tensors[at] = x.sin().t().contiguous().t()
            elif step == 12 and choose.random() < 0.3:
                torch.manual_seed(choose.randrange(100))
            elif step == 13 and choose.random() < 0.2 and x.sum() > y.sum():
                tensors.append(torch.randn(4, 6))
        for index, tensor in enumerate(tensors):
            self.register_buffer(f"t{index}", tensor)


def test_random_constructors():
    for seed in range(20):
        want, after = build_plain(lambda seed=seed: Program(seed), seed)
        torch.manual_seed(seed)
        _, tape = record(lambda seed=seed: Program(seed))
        assert tape.whole is None
        choose = random.Random(seed)
        for share in (0, 0.3, 1):
            names = [name for name in want if choose.random() < share]
            got = dict(tape.replay(lambda name, names=names: keep_whole(name) if name in names else None))
            assert_bit_equal(got, {name: want[name] for name in names})
            assert torch.equal(torch.get_rng_state(), after), seed


def numpy_view(self):
    self.a = nn.Linear(3, 3)
    self.a.weight.detach().numpy()[:] *= 2


def own_generator(self):
    generator = torch.Generator().manual_seed(3)
    self.a = nn.Parameter(torch.empty(3).normal_(generator=generator))


ELSEWHERE = torch.Generator()
torch.rand(3, generator=ELSEWHERE)
OUTSIDE = torch.zeros(3)


def foreign_state(self):
    torch.set_rng_state(ELSEWHERE.get_state())
    self.a = nn.Linear(3, 3)


def changes_outside(self):
    OUTSIDE.zero_()
    OUTSIDE.add_(torch.rand(3))
    self.a = nn.Parameter(OUTSIDE * 2)


def is_outside(self):
    self.a = nn.Parameter(OUTSIDE)


def changed_through_an_array(self):
    array = np.zeros(3)
    self.a = nn.Parameter(torch.from_numpy(array) + torch.rand(3))
    self.b = nn.Parameter(torch.from_numpy(array))
    array += 1


def changes_an_array(self):
    array = np.zeros(3)
    torch.from_numpy(array).add_(torch.rand(3))
    self.a = nn.Parameter(torch.from_numpy(array))


def falls_back_quietly(self):
    self.a = nn.Parameter(torch.rand(4))
    try:
        self.b = nn.Parameter(torch.from_numpy(self.a.detach().numpy() + 1))
    except (RuntimeError, TypeError):
        self.b = nn.Linear(9, 9)


def list_index(self):
    self.a = nn.Parameter(torch.rand(4)[[2, 0, 1]])


def laid_out_otherwise(self):
    self.a = nn.Linear(5, 5)
    self.b = nn.Parameter(torch.linalg.svd(torch.rand(5, 5))[2])
    self.c = nn.Parameter(torch.rand(3))


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (numpy_view, "numpy"),
        (own_generator, "generator of its own"),
        (foreign_state, "generator is set to one from elsewhere"),
        (changes_outside, "from outside is changed"),
        (is_outside, "not made by torch's operators"),
        (changed_through_an_array, "from outside is changed"),
        (changes_an_array, "from outside is changed"),
        (falls_back_quietly, "numpy"),
        (list_index, "not made by torch's operators"),
        (laid_out_otherwise, "lays its result out otherwise"),
    ],
)
def test_what_cannot_be_recorded_is_built_whole(fill, reason):
    _, tape = assert_same_start(lambda: Small(fill))
    assert reason in tape.whole
    torch.manual_seed(8)
    random.seed(7)
    np.random.seed(7)
    want = dict(Small(fill).named_parameters())
    assert_bit_equal(dict(tape.replay(keep_whole, seed=8)), want)


def test_an_error_of_the_constructor_is_raised_as_it_is():
    def fill(self):
        self.a = nn.Linear(3, 3)
        self.a.weight.data @ torch.rand(4)

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size mismatch"):
        record(lambda: Small(fill))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.rand(3).device.type == "cpu"


def test_a_rank_gets_what_it_wants_in_memory_of_its_own():
    want, after = build_plain(lambda: GPT2(64, 32, 2, 16, 4), seed=7)
    torch.manual_seed(7)
    module, tape = record(lambda: GPT2(64, 32, 2, 16, 4))
    cuts = {
        "lm_head.weight": lambda w: w[:32],
        "wte.weight": lambda w: w[:32],
        "h.1.mlp.c_fc.weight": lambda w: w[16:32].t(),
        "h.0.ln_1.bias": lambda w: w,
    }
    got = dict(tape.replay(cuts.get))
    assert_bit_equal(got, {name: cut(want[name]) for name, cut in cuts.items()})
    assert all(shard.untyped_storage().nbytes() == shard.nbytes and not shard.requires_grad for shard in got.values())
    assert torch.equal(torch.get_rng_state(), after)
    assert not dict(tape.replay(lambda name: None)) and torch.equal(torch.get_rng_state(), after)
    assert module.lm_head.weight is module.wte.weight


def test_replays_may_be_interleaved():
    torch.manual_seed(7)
    _, tape = record(models.TinyGPT)
    want, _ = build_plain(models.TinyGPT, seed=7)
    first, second = tape.replay(keep_whole), tape.replay(keep_whole)
    pairs = []
    for pair in zip(first, second, strict=True):
        pairs.append(pair)
        torch.rand(3)
    assert_bit_equal(dict(one for one, _ in pairs), want)
    assert_bit_equal(dict(other for _, other in pairs), want)


def test_threads_replay_side_by_side():
    want, _ = build_plain(models.TinyGPT, seed=7)

    def rank_weights(rank):
        _, tape = record(models.TinyGPT)
        return dict(tape.replay(lambda name: lambda w: w.chunk(4)[rank].clone(), seed=7))

    shards = run_threads(4, rank_weights)
    assert_bit_equal({name: torch.cat([shard[name] for shard in shards]) for name in want}, want)


def test_values_of_unregistered_tensors():
    def fill(self):
        self.mask = torch.full((4, 4), float("-inf")).triu(1)
        self.noise = torch.rand(3)
        self.outside = torch.from_numpy(np.arange(3))

    torch.manual_seed(7)
    module, tape = record(lambda: Small(fill))
    torch.manual_seed(7)
    plain = Small(fill)
    state = torch.get_rng_state()
    assert module.mask.is_meta and torch.equal(tape.value(module.mask), plain.mask)
    assert torch.equal(tape.value(module.mask[1:, :2]), plain.mask[1:, :2])
    assert torch.equal(tape.value(module.noise), plain.noise)
    assert torch.equal(tape.value(module.outside), plain.outside)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_value_of_a_buffer_that_was_cast():
    module, tape = record(lambda: Small(lambda self: self.register_buffer("mask", torch.eye(3))))
    module.double()
    assert torch.equal(tape.value(module.mask), torch.eye(3, dtype=torch.float64))


def test_a_ready_module_is_cut_as_it_is():
    module = models.TinyGPT()
    source = from_module(module)
    got = dict(source.replay(lambda name: (lambda w: w[1:]) if name == "wpe.weight" else None, seed=3))
    assert_bit_equal(got, {"wpe.weight": module.wpe.weight.detach()[1:]})
    got["wpe.weight"].zero_()
    assert module.wpe.weight.abs().sum() > 0
    assert source.value(module.wpe.weight) is not module.wpe.weight
