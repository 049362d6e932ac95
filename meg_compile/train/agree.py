"""Before a step runs: do the ranks of a replica hold the same rows, and how many tokens count in all?"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meg_compile.errors import MegError
from meg_compile.train.batches import checksum

NO_LABELS = -1


class Agreed(NamedTuple):
    """tokens: counted in the global batch. checksums: of the rows of each replica, by dp rank."""

    tokens: int
    checksums: list[int]


def agree(
    batch: Mapping[str, Tensor],
    num_counted: int,
    dp: int,
    dp_rank: int,
    device: torch.device,
    where: str,
    labels: int = 0,
) -> Agreed:
    """`agree_on` the checksum of a replica's rows."""
    return agree_on(checksum(batch), num_counted, dp, dp_rank, device, where, labels)


def agree_on(
    here: int, num_counted: int, dp: int, dp_rank: int, device: torch.device, where: str, labels: int | None = 0
) -> Agreed:
    """One all-reduce of 32 bytes a replica over the world.

    Each replica has four slots, of which the maximum over all ranks is taken: checksum, -checksum, count, and `labels`,
    which must be the same for all replicas, but those that have None. Its ranks
    agree where the first two belong to one number. MegError, on every rank, where they do not or nothing counts;
    `where` begins its message.
    """
    slots = torch.full((dp, 4), torch.iinfo(torch.int64).min)
    slots[dp_rank] = torch.tensor([here, -here, num_counted, NO_LABELS if labels is None else labels])
    if dist.is_initialized() and dist.get_world_size() > 1:
        slots = slots.to(device)
        dist.all_reduce(slots, dist.ReduceOp.MAX)
    largest, negated_smallest, counts, every_label = slots.T.tolist()
    if differing := [replica for replica in range(dp) if largest[replica] != -negated_smallest[replica]]:
        raise MegError(
            f"{where}: the ranks of replica {', '.join(map(str, differing))} read different rows. A dataset must give "
            "the same row for the same index on every rank: it may not depend on the rank, the time or a generator of "
            "its own"
        )
    if len(set(every_label) - {NO_LABELS}) > 1:
        raise MegError(
            f"{where}: the loss holds a cross entropy inside a larger expression, and replicas count different numbers "
            "of labels, so that the mean of their losses is not the global batch's: return the cross entropy itself, "
            "or use plan.dp=1 and a train.micro_batch_size of the whole global batch"
        )
    if sum(counts) <= 0:
        raise MegError(
            f"{where}: no label of the global batch counts, so it has no loss; give rows with labels to learn"
        )
    return Agreed(sum(counts), largest)
