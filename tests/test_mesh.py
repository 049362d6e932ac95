"""The mesh against the groups that Megatron-LM builds.

data/megatron_groups.json was recorded from megatron-core 0.16.1's own `initialize_model_parallel`: every group
in creation order, and per rank (a list over ranks) what its getters return.
"""

import json
from pathlib import Path

import pytest

from meg_compile.mesh import Mesh

CASES = json.loads((Path(__file__).parent / "data/megatron_groups.json").read_text())
GETTERS = {
    "tp_rank": lambda mesh, rank: mesh.coords(rank).tp,
    "cp_rank": lambda mesh, rank: mesh.coords(rank).cp,
    "dp_rank": lambda mesh, rank: mesh.coords(rank).dp,
    "pp_rank": lambda mesh, rank: mesh.coords(rank).pp,
    "tp_src": lambda mesh, rank: mesh.source("tp", rank),
    "dp_src": lambda mesh, rank: mesh.source("dp", rank),
    "mp_src": lambda mesh, rank: mesh.source("tp_pp", rank),
    "pp_first": lambda mesh, rank: mesh.group_of("pp", rank)[0],
    "pp_last": lambda mesh, rank: mesh.group_of("pp", rank)[-1],
    "pp_next": lambda mesh, rank: mesh.next_stage(rank),
    "pp_prev": lambda mesh, rank: mesh.prev_stage(rank),
    "is_first": lambda mesh, rank: mesh.is_first_stage(rank),
    "is_last": lambda mesh, rank: mesh.is_last_stage(rank),
    "in_embd": lambda mesh, rank: rank in mesh.group_of("embd", rank),
    "in_pos_embd": lambda mesh, rank: rank in mesh.group_of("pos_embd", rank),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_groups_and_getters_are_megatrons(case):
    mesh = Mesh(**case["sizes"])
    assert {name: mesh.groups(name) for name in case["groups"]} == case["groups"]
    assert case["per_rank"].keys() == GETTERS.keys()
    for name, expected in case["per_rank"].items():
        assert [GETTERS[name](mesh, rank) for rank in range(mesh.size)] == expected, name


def test_rank_undoes_coords():
    mesh = Mesh(tp=2, cp=3, dp=4, pp=5)
    assert mesh.size == 120
    assert [mesh.rank(*mesh.coords(rank)) for rank in range(120)] == list(range(120))
    assert mesh.coords(1).tp == 1 and mesh.coords(2).cp == 1


def test_ranks_outside_the_mesh():
    mesh = Mesh(tp=2, pp=2)
    for call in (lambda: mesh.coords(4), lambda: mesh.coords(-1), lambda: mesh.rank(tp=2)):
        with pytest.raises(IndexError, match="outside"):
            call()


def test_sizes_and_names_are_checked():
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh(tp=0)
    with pytest.raises(KeyError, match="tp_pp"):
        Mesh().groups("pp_tp")
