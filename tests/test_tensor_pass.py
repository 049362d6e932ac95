"""The rewritten graph: golden text, where f and g stand, what becomes of biases and literals.

The golden files are rewritten by ACCEPT=1 python -m pytest tests/test_tensor_pass.py
"""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from compare import compile_case
from zoo import ZOO, case, gpt2, lm
from zoo_layers import NormedHeads

from meg_compile.errors import MegError
from meg_compile.explain.text import to_text
from meg_compile.graph.nodes import base_name
from meg_compile.models.gpt2 import GPT2
from meg_compile.ops.collectives import copy_to_tp, reduce_from_tp
from meg_compile.passes.partition import find_layers
from meg_compile.passes.sequence import shard_sequence
from meg_compile.passes.tensor import tensor_parallel
from meg_compile.plan import Plan

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    text = text.rstrip() + "\n"
    if os.environ.get("ACCEPT") == "1":
        path.write_text(text)
    assert path.exists(), f"no {path.name}: run with ACCEPT=1"
    assert text == path.read_text(), f"{path.name} differs: run with ACCEPT=1 where that is right, and look at the diff"


def rewritten(program):
    """The whole rewritten graph with its values' local shapes, stage by stage."""
    return [node for stage in program.stages for node in stage.graph.nodes]


def targets(program) -> Counter:
    return Counter(base_name(n.target) for n in rewritten(program) if n.op == "call_function")


def block_text(program, block: str) -> str:
    graph = program.stages[0].graph
    layer = next(layer for layer in find_layers(graph) if layer.name == block)
    inside = [
        n for n in layer.nodes if any(block in path for path, _ in (n.meta.get("nn_module_stack") or {}).values())
    ]
    return re.sub(r"gpt2\.py:\d+", "gpt2.py", to_text(inside))


@pytest.mark.parametrize("layout", ["thirds", "stacked", "per_head"])
def test_a_block_of_gpt2_on_two_ranks(layout):
    program = compile_case(case(gpt2(qkv_layout=layout)), Plan(tp=2), 2)
    check_golden(f"gpt2_block_{layout}.txt", block_text(program, "h.0"))


def nano() -> GPT2:
    return GPT2(vocab_size=64, context=32, layers=4, hidden=32, heads=4)


def test_the_explanation_of_a_small_gpt2():
    """The same text every time it is made."""
    plan = Plan(tp=2, pp=2)
    texts = [compile_case(case(nano), plan, 2).explain(2, 1) for _ in range(2)]
    assert texts[0] == texts[1]
    check_golden("explain_nano.txt", re.sub(r"\.py:\d+", ".py", texts[0]))


def test_the_structure_of_plan_json():
    """Keys and types, not values: what people's scripts rely on."""
    plain = json.loads(json.dumps(compile_case(case(nano), Plan(tp=2, pp=2), 2).to_dict(2)))
    check_golden("plan_json.txt", "\n".join(structure(plain)))


def structure(value, path: str = "") -> list[str]:
    """path: type, one line each; of lists and of the parameters only the first entry."""
    if isinstance(value, dict):
        items = list(value.items())[:1] if path == "params" else value.items()
        return [x for k, v in items for x in structure(v, f"{path}.{'*' if path == 'params' else k}".lstrip("."))]
    if isinstance(value, list):
        return structure(value[0], f"{path}[]") if value else [f"{path}: empty list"]
    return [f"{path}: {type(value).__name__}"]


def test_f_and_g_come_in_pairs():
    """Per block an f and a g for attention and for the MLP; a g after the embedding, an f before the head."""
    counts = targets(compile_case(ZOO["gpt2_4"], Plan(tp=2), 2))
    assert counts["copy_to_tp"] == 2 * 4 + 1 and counts["reduce_from_tp"] == 2 * 4 + 1
    assert counts["vocab_embedding"] == 1 and counts["vocab_cross_entropy"] == 1


def test_one_f_serves_all_readers():
    """q, k and v read one norm; in a parallel block so does the MLP."""
    counts = targets(compile_case(ZOO["separate"], Plan(tp=2), 2))
    assert counts["copy_to_tp"] == 2 * 2 + 1
    counts = targets(compile_case(ZOO["parallel_block"], Plan(tp=2), 2))
    assert counts["copy_to_tp"] == 2 + 1


def test_one_rank_gets_the_captured_graph():
    program = compile_case(ZOO["gpt2_4"], Plan(), 2)
    counts = targets(program)
    assert not any(name in counts for name in ("copy_to_tp", "reduce_from_tp", "vocab_embedding", "part_of"))
    before = Counter(base_name(n.target) for n in program.captured.graph.nodes if n.op == "call_function")
    assert counts == before


def test_a_row_bias_is_added_after_g_and_is_whole():
    program = compile_case(ZOO["gpt2_4"], Plan(tp=2), 2)
    for node in rewritten(program):
        if node.target is reduce_from_tp and "linear" in node.args[0].name:
            (reader,) = node.users
            assert base_name(reader.target) == "add" and len(node.args[0].args) == 2, "the bias is in the product"
    spec = program.params["h.0.mlp.c_proj.bias"]
    assert not spec.sharded and not spec.partial


def test_a_column_bias_is_cut_with_its_weight():
    program = compile_case(ZOO["gpt2_4"], Plan(tp=2), 2)
    assert program.params["h.0.mlp.c_fc.bias"].local_shape == (32,)
    assert program.params["h.0.attn.c_attn.bias"].local_shape == (24,)


def test_parameters_that_shards_read_get_partial_gradients():
    program = compile_case(case(lm(NormedHeads)), Plan(tp=2), 2)
    partial = {name for name, spec in program.params.items() if spec.partial}
    assert partial == {f"h.{i}.attn.{n}_norm.{w}" for i in range(2) for n in "qk" for w in ("weight", "bias")}


def test_no_parameter_of_gpt2_has_partial_gradients():
    assert not any(spec.partial for spec in compile_case(ZOO["gpt2_4"], Plan(tp=2), 2).params.values())


def test_literals_are_local():
    program = compile_case(ZOO["gpt2_stacked_tied"], Plan(tp=2), 2)
    views = [n for n in rewritten(program) if base_name(n.target) == "reshape" and len(n.args[1]) == 5]
    assert views and all(list(n.args[1]) == [2, 6, 3, 2, 4] for n in views)


def test_every_node_keeps_the_place_that_it_comes_from():
    program = compile_case(ZOO["gpt2_4"], Plan(tp=2), 2)
    for node in rewritten(program):
        if node.op == "call_function" and node.target in (copy_to_tp, reduce_from_tp):
            assert node.meta.get("stack_trace") and node.meta.get("nn_module_stack"), node


def test_a_literal_that_is_forgotten_is_found(monkeypatch):
    """A rule that does not localise a view gives shards of another shape: the trial run says which node."""
    from meg_compile.passes import tensor

    real = tensor._Rewriter.rewrite

    def forgetful(self, node, op):
        op.localise = None
        return real(self, node, op)

    monkeypatch.setattr(tensor._Rewriter, "rewrite", forgetful)
    with pytest.raises((MegError, RuntimeError), match="shape"):
        compile_case(case(gpt2(qkv_layout="stacked")), Plan(tp=2), 2)


def test_the_pass_leaves_the_captured_graph_alone():
    program = compile_case(ZOO["gpt2_4"], Plan(), 2)
    graph = program.captured.graph
    before = str(graph)
    tensor_parallel(
        graph, program.axes, program.choice.layout, shard_sequence(program.axes, program.choice.layout, program.plan)
    )
    assert str(graph) == before


def test_the_graph_of_every_tp_rank_is_the_same():
    """Ranks differ in what is bound to the graph, never in the graph."""
    program = compile_case(ZOO["vocab_101"], Plan(tp=4), 2)
    shapes = {tuple(shard.local_shape for shard in spec.shards) for spec in program.params.values()}
    assert all(len(set(s)) == 1 for s in shapes)
    assert torch.Size(program.params["wte.weight"].local_shape) == torch.Size([26, 16])
