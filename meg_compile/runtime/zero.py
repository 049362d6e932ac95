"""What replicas would hold alike, shared among them by torch's FSDP2 (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054).

plan.zero   parameters are whole                 gradients are summed          so that sharded are
1           from a step's first forward on       after the last micro-batch    optimizer states (and fp32 masters)
2           from a step's first forward on       after every micro-batch       and gradients
3           while a block runs, or the stage     after every micro-batch       and parameters

What FSDP2 gathers at once is a block, or all of a stage outside its blocks. Each parameter is cut along its first dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meg_compile.runtime.stage import StageModule


def rows(whole: torch.Tensor, dp: int, dp_rank: int) -> torch.Tensor:
    """A replica's rows of a tensor: the dp_rank-th of dp parts of ceil(n / dp) rows, the last ones less or none."""
    first, last = row_span(whole.shape[0], dp, dp_rank)
    return whole.narrow(0, first, last - first)


def row_span(num_rows: int, dp: int, dp_rank: int) -> tuple[int, int]:
    """The first of a replica's rows, and the one after its last."""
    size = -(-num_rows // dp)
    first = min(dp_rank * size, num_rows)
    return first, min(first + size, num_rows)


class Shards:
    """`parameters`: this rank's shards by the user's names, as plain tensors.

    stages:  with parameters on meta, which are replaced.
    names:   the parameters that are sharded.
    low:     the dtype in which they are read, where that is not the one in which they are held.
    """

    def __init__(
        self,
        stages: list[StageModule],
        names: Mapping[nn.Parameter, str],
        zero: int,
        mesh: DeviceMesh,
        device: torch.device,
        low: torch.dtype | None,
    ):
        self.zero, self.roots = zero, list[FSDPModule]()
        self.parameters: dict[str, nn.Parameter] = {}
        self._sharded: dict[str, nn.Parameter] = {}  # what FSDP2 knows them by
        # Nothing writes into what a unit returns: passes/in_place.py sees to it.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        policy = MixedPrecisionPolicy(low, low and torch.float32, cast_forward_inputs=False)
        for stage in stages:
            body = stage.body
            paths = {path: names[p] for path, p in body.named_parameters() if p in names}
            rest = {p for p in body.parameters() if p not in names}
            for module in (*stage.blocks, body):
                unit = fully_shard(
                    module, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=rest
                )
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
            body._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
            self._sharded |= {paths[path]: p for path, p in body.named_parameters() if path in paths}
            assert isinstance(body, FSDPModule)
            self.roots.append(body)
        for name, parameter in self._sharded.items():
            assert isinstance(parameter, DTensor)
            self.parameters[name] = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)

    def begin(self) -> None:
        """Before the first forward of a step. What an evaluation left whole may be of older weights: it is given up."""
        for root in self.roots:
            for group in _groups(root):
                group.reshard()
            root.set_requires_gradient_sync(self.zero > 1)
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(self.zero == 3)

    def finish(self) -> None:
        """After the last backward of a step: give up what is whole, and add the sums over replicas to the gradients.

        torch.distributed.pipelining ends a step of a stage under FSDP2 in the same way.
        """
        for root in self.roots:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            for group in _groups(root):
                group.post_backward()
            _state(root)._root_post_backward_final_callback()
        for name, parameter in self._sharded.items():
            if isinstance(parameter.grad, DTensor):
                mine, grad = self.parameters[name], parameter.grad.to_local()
                mine.grad = grad if mine.grad is None else mine.grad + grad
                parameter.grad = None


def _state(root: FSDPModule) -> Any:
    return fully_shard.state(root)  # type: ignore[attr-defined]


def _groups(root: FSDPModule) -> list[Any]:
    """What FSDP2 gathers at once, of a stage; nothing before its first forward."""
    return [group for one in _state(root)._state_ctx.all_states for group in one._fsdp_param_groups]
