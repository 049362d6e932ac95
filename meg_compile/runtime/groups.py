"""The process groups of a rank, on torch's DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meg_compile.mesh import DIMS, Coords, Mesh


@dataclass(frozen=True)
class Groups:
    """The groups that this rank talks in; None where a group has one member, so nothing needs to be said.

    device_mesh has the mesh dims pp, dp, cp, tp: those of the ranks, slowest first. `tp_pp` holds the ranks of one
    replica of the model, `dp_cp` those with the same parameters.
    """

    mesh: Mesh
    rank: int
    coords: Coords
    device_mesh: DeviceMesh
    tp: ProcessGroup | None
    cp: ProcessGroup | None
    dp: ProcessGroup | None
    pp: ProcessGroup | None
    tp_pp: ProcessGroup | None
    dp_cp: ProcessGroup | None


def init_groups(mesh: Mesh, device_type: str) -> Groups:
    """Build this rank's groups, collectively with all ranks, after `init_process_group`.

    device_type: "cpu" or "cuda". The default group must have as many ranks as the mesh.
    """
    assert dist.get_world_size() == mesh.size, f"{mesh} on {dist.get_world_size()} processes"
    rank = dist.get_rank()
    dims = DIMS[::-1]
    device_mesh = init_device_mesh(device_type, tuple(mesh.sizes)[::-1], mesh_dim_names=dims)
    groups = {dim: device_mesh.get_group(dim) if getattr(mesh, dim) > 1 else None for dim in dims}
    return Groups(
        mesh,
        rank,
        mesh.coords(rank),
        device_mesh,
        tp_pp=_joint(mesh, groups, "tp", "pp"),
        dp_cp=_joint(mesh, groups, "dp", "cp"),
        **groups,
    )


def _joint(mesh: Mesh, groups: dict[str, ProcessGroup | None], one: str, other: str) -> ProcessGroup | None:
    """The group of two mesh dims: that of one where the other is of size 1, else a group of its own."""
    sizes = getattr(mesh, one), getattr(mesh, other)
    if 1 in sizes:
        return groups[one] or groups[other]
    if sizes[0] * sizes[1] == mesh.size:
        return dist.group.WORLD
    mine, _ = dist.new_subgroups_by_enumeration(mesh.groups(f"{one}_{other}"))
    assert isinstance(mine, ProcessGroup)
    return mine
