"""What happens to gradients between the last backward and the optimizer.

Whole parameters that were read on shards hold partial gradients (sum over tp); a tied parameter has a copy on each
stage that reads it (sum over those stages); replicas have read different rows (sum over dp: the loss is scaled by
the global batch's size beforehand). All are sums, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BUCKET_BYTES = 32 * 2**20


def all_reduce_buckets(grads: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group, in place, as few large messages."""
    for bucket in _buckets(grads):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        for grad, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(part)


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
