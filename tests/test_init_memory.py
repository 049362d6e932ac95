"""Memory while weights are replayed: the shards and about one parameter, never the model."""

import gc
import subprocess
import sys
import weakref

import models
import pytest
import torch
from test_init import xavier
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meg_compile.models.gpt2 import GPT2
from meg_compile.runtime.init import record


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make, while they live."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
        return result

    def freed(self, address, num_bytes):
        del self.seen[address]
        self.now -= num_bytes


def rescaled(module):
    """What many models do at the end: walk over the finished modules and change their weights in place."""
    with torch.no_grad():
        for _, parameter in module.named_parameters():
            parameter.mul_(0.5)
        for _, parameter in module.named_parameters():
            parameter.copy_(parameter.clone().clamp(-1, 1))
    return module


@pytest.mark.parametrize(
    ("build", "largest_in_flight"),
    [
        (lambda: GPT2(512, 64, 4, 64, 4), 1),
        (lambda: GPT2(512, 64, 4, 64, 4).to(torch.float64), 1.5),  # float32 beside its float64
        (lambda: xavier(models.TinyGPT(d=64)), 1),
        (lambda: rescaled(GPT2(512, 64, 4, 64, 4)), 3),  # with its clone, and the clone clamped
        (lambda: nn.Transformer(64, 4, 2, 2, batch_first=True), 1),
    ],
    ids=["gpt2", "float64", "xavier", "rescaled", "transformer"],
)
def test_peak_memory_is_the_shards_and_about_one_parameter(build, largest_in_flight):
    torch.manual_seed(7)
    with LiveBytes() as recording:
        _, tape = record(build)
    assert tape.whole is None and recording.peak < 50_000  # generator states and the like
    sizes = {name: tensor.nbytes for name, tensor in build().named_parameters()}

    with LiveBytes() as replay:
        shards = [shard for _, shard in tape.replay(lambda name: lambda w: w.chunk(4)[0])]
    gc.collect()
    held = sum(shard.nbytes for shard in shards)
    assert held < 0.35 * sum(sizes.values())
    assert replay.peak < held + largest_in_flight * max(sizes.values()) + 50_000


PEAK_MIB = """
import resource
from meg_compile.models.gpt2 import GPT2
from meg_compile.runtime.init import record

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

_, tape = record(lambda: GPT2(vocab_size=8192, context=64, layers=8, hidden=1024, heads=16))
before = peak()
shards = list(tape.replay(lambda name: lambda w: w.chunk(4)[0], seed=7))
print(peak() - before)
"""


def test_peak_of_a_process_follows_its_shards():
    """The whole model has 417 MiB, a quarter of it 104, its largest parameter 32."""
    run = subprocess.run([sys.executable, "-c", PEAK_MIB], check=True, stdout=subprocess.PIPE)
    assert int(run.stdout) < 104 + 32 + 40
