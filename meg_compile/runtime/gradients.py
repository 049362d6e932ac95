"""What happens to gradients between the last backward and the optimizer.

Whole parameters that were read on shards hold partial gradients (sum over tp); a tied parameter has a copy on each
stage that reads it (sum over those stages); replicas have read different rows (sum over dp: the loss is scaled by
the global batch's size beforehand). All are sums, so their order does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.hooks import RemovableHandle

BUCKET_BYTES = 32 * 2**20


def all_reduce_buckets(grads: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group, in place, as few large messages."""
    for bucket in _buckets(grads):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(part)


class Overlapped:
    """Sums over replicas that start in backward: a bucket as soon as its last gradient is complete (Li et al. 2020,
    "PyTorch Distributed", section 3.2.3).

    How often a parameter's gradient is added to in a step depends on the schedule; a first step counts it, and sums
    afterwards. Buckets go out in one order on all ranks: the last parameters first.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], group: dist.ProcessGroup):
        self.parameters, self.group = list(parameters), group
        self.buckets: list[list[torch.Tensor]] = []
        self.home: dict[torch.Tensor, int] = {}
        self.expected: dict[int, Counter[torch.Tensor]] = {}
        self.hooks: list[RemovableHandle] = []

    def start(self, num_micro_batches: int) -> None:
        """Before the first forward of a step, with no gradients left from another."""
        self.counted: Counter[torch.Tensor] = Counter()
        self.known = self.expected.get(num_micro_batches)
        self.num, self.sent = num_micro_batches, list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]]()
        self.missing = [len(bucket) for bucket in self.buckets]
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in self.parameters]

    def finish(self) -> None:
        """After the last backward: every gradient is the sum over the replicas."""
        for hook in self.hooks:
            hook.remove()
        if self.known is None:
            self.expected[self.num] = self.counted
            self.buckets = list(_buckets(p for p in reversed(self.parameters) if p.grad is not None))
            self.home = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, flat, work in self.sent:
            work.wait()
            for parameter, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(summed)

    def _added(self, parameter: torch.Tensor) -> None:
        self.counted[parameter] += 1
        if self.known is None:
            return
        assert self.counted[parameter] <= self.known[parameter], "a gradient that was sent already is added to"
        if self.counted[parameter] == self.known[parameter]:
            self.missing[self.home[parameter]] -= 1
            while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
                self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        flat = _flatten_dense_tensors([p.grad for p in bucket])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        self.sent.append((bucket, flat, work))


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        num_bytes = grad.numel() * grad.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += num_bytes
    if bucket:
        yield bucket
