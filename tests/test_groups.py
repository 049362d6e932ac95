"""Process groups against the mesh arithmetic (itself tested against Megatron), and the ranks-as-threads helper."""

import pytest
import torch
import torch.distributed as dist
from threads import run_threads
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meg_compile.mesh import Mesh
from meg_compile.runtime.groups import init_groups

NAMES = ("tp", "cp", "dp", "pp", "tp_pp")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp": 4},
        {"pp": 4},
        {"dp": 3},
        {"tp": 2, "pp": 2},
        {"tp": 2, "dp": 2},
        {"pp": 3, "dp": 2},
        {"tp": 2, "cp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "dp": 3},
        {"tp": 2, "cp": 2, "pp": 2, "dp": 2},
    ],
    ids=str,
)
def test_groups_are_those_of_the_mesh(sizes):
    mesh = Mesh(**sizes)

    def seen(rank):
        groups = init_groups(mesh, "cpu")
        assert (groups.rank, groups.coords) == (rank, mesh.coords(rank))
        assert groups.device_mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
        sums = {}
        for name in NAMES:
            group = getattr(groups, name)
            if group is None:
                sums[name] = [rank], rank
                continue
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            sums[name] = dist.get_process_group_ranks(group), total.item()
        return sums

    for rank, sums in enumerate(run_threads(mesh.size, seen)):
        for name in NAMES:
            members = mesh.group_of(name, rank)
            assert sums[name] == (members, sum(members)), (rank, name)


def test_a_group_of_one_is_none():
    def none(rank):
        groups = init_groups(Mesh(pp=2), "cpu")
        return [name for name in NAMES if getattr(groups, name) is None]

    assert run_threads(2, none) == [["tp", "cp", "dp"]] * 2


def test_the_mesh_must_fit_the_processes():
    with pytest.raises(AssertionError, match="on 2 processes"):
        run_threads(2, lambda rank: init_groups(Mesh(tp=4), "cpu"))


def test_threads_return_in_rank_order():
    assert run_threads(3, lambda rank: rank * 10) == [0, 10, 20]
    assert run_threads(1, lambda rank: dist.get_world_size()) == [1]


@pytest.mark.parametrize("wait", ["collective", "recv"])
def test_threads_stop_when_one_fails(wait):
    def work(rank):
        if rank == 1:
            raise ValueError("broken")
        tensor = torch.zeros(1)
        if wait == "recv":
            dist.recv(tensor, 1)
        dist.all_reduce(tensor)

    with pytest.raises(ValueError, match="broken") as failure:
        run_threads(3, work)
    assert failure.value.__notes__ == ["raised by rank 1 of 3"]
    assert run_threads(2, lambda rank: rank) == [0, 1]


def test_threads_that_hang_are_named():
    with pytest.raises(TimeoutError, match=r"rank1 still ran"):
        run_threads(2, lambda rank: dist.recv(torch.zeros(1), 0) if rank else None, timeout_s=1)


def test_threads_send_and_receive():
    def ring(rank):
        to_right, from_left = torch.tensor([float(rank)]), torch.empty(1)
        ops = [
            dist.P2POp(dist.irecv, from_left, (rank - 1) % 4),
            dist.P2POp(dist.isend, to_right, (rank + 1) % 4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if rank == 0:
            dist.send(to_right + 10, 3)
            dist.send(to_right + 20, 3)
        if rank == 3:
            dist.recv(to_right, 0)
        return from_left.item(), to_right.item()

    assert run_threads(4, ring) == [(3, 0), (0, 1), (1, 2), (2, 10)]


def test_threads_run_a_pipeline_schedule():
    def model():
        generator = torch.Generator().manual_seed(5)
        linears = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3)))
        with torch.no_grad():
            for linear in linears:
                linear.weight.copy_(torch.randn(4, 4, generator=generator))
        return linears

    inputs = torch.arange(24, dtype=torch.float64).view(6, 4)
    plain = model()
    plain(inputs).square().sum().backward()

    def stage(rank):
        linear = model()[rank]
        stage = PipelineStage(linear, rank, 3, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 6, loss_fn=lambda out, target: (out - target).square().sum(), scale_grads=False)
        target = {"target": torch.zeros(6, 4, dtype=torch.float64)} if rank == 2 else {}
        schedule.step(*([inputs] if rank == 0 else []), **target)
        return linear.weight.grad

    for grad, linear in zip(run_threads(3, stage), plain, strict=True):
        assert torch.allclose(grad, linear.weight.grad, rtol=1e-12)
