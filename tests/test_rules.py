"""Rules that users write for their own operators, and what is told of operators without one."""

import json
from pathlib import Path

import own_ops
import pytest
import torch
from compare import check, compile_case
from zoo import case

import run
from meg_compile import rule
from meg_compile.axes import Dims, broadcast
from meg_compile.axes import op as registry
from meg_compile.errors import Refused
from meg_compile.plan import Plan

README = Path(__file__).parents[1] / "README.md"
NET = case(own_ops.Net, "*.fc1.*", "*.fc2.weight", "emb.weight", "out.weight", vocab=256)


@pytest.fixture
def without_squash(monkeypatch):
    """No rule for an operator of the model."""
    monkeypatch.delitem(registry._RULES, "own_ops::squash")


@pytest.mark.parametrize("plan", [Plan(tp=2, pp=2, sp=True), Plan(tp=2, dp=2), Plan(cp=3)], ids=str)
def test_own_operators_with_rules_run_in_parallel(plan):
    """Micro-batches of one row: the same rules say that rows do not see each other."""
    program = check(NET, plan, 1)
    assert not program.units.coupled and not program.units.unclear
    assert program.parallel_flops().share == (plan.tp > 1)


def test_a_rule_that_needs_a_dim_whole_is_the_reason():
    program = compile_case(NET, Plan(tp=2), 2)
    reasons = {a.whole for a in program.axes.stored["emb.weight"][1]}
    assert any("own_ops::centre takes a mean over it (own_ops.py:" in str(reason) for reason in reasons)


def test_an_operator_of_a_library_is_not_taken_for_one_of_torch():
    """Its name is that of torch's softmax, and it doubles: no rule of torch's may speak for it."""

    @torch.library.custom_op("own_test::softmax", mutates_args=())
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    softmax.register_fake(torch.empty_like)
    softmax.register_autograd(lambda ctx, grad: 2 * grad)

    class Net(own_ops.Net):
        def forward(self, ids):
            return softmax(super().forward(ids))

    program = check(case(Net, "*.fc1.*", "*.fc2.weight", "emb.weight", vocab=256), Plan(tp=2), 2)
    assert "own_test::softmax" in program.units.unclear


@pytest.mark.usefixtures("without_squash")
def test_an_operator_without_a_rule_says_what_it_costs_and_what_to_do():
    program = compile_case(NET, Plan(tp=2), 2)
    text, (told,) = program.explain(), program.to_dict()["operators_without_a_rule"]
    assert told["operator"] == "own_ops::squash" and told["source"].startswith("own_ops.py:") and told["times"] == 2
    assert told["linears"] == ("h.*.fc1", "h.*.fc2")
    assert told["share"] == pytest.approx(1 - program.parallel_flops().share)
    advice = 'add one beside the model, with @meg_compile.rule("own_ops::squash")'
    assert f"own_ops::squash: {advice}" in text and advice in program.units.unclear
    with pytest.raises(Refused) as caught:
        compile_case(NET, Plan(cp=3), 2)
    (fault,) = caught.value.faults
    assert "own_ops::squash (own_ops.py:" in fault.problem and advice in fault.problem


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda op, x, width: Dims(x[1:]), r"says \[6, 32\], and the operator gives \[2, 6, 32\]"),
        (lambda op, x, width: None, r"says NoneType, and the operator gives"),
        (lambda op, x, width: [x, x], r"says \[2, 6, 32\], \[2, 6, 32\], and the operator gives \[2, 6, 32\]"),
        (lambda op, x: x, r"raises TypeError: .*positional"),
    ],
    ids=["shape", "nothing", "two", "arguments"],
)
def test_a_rule_that_contradicts_the_capture_is_named(monkeypatch, wrong, said):
    monkeypatch.setitem(registry._RULES, "own_ops::squash", wrong)
    with pytest.raises(
        Refused, match=rf"own_ops::squash \(own_ops.py:\d+\): the rule <lambda> \(test_rules.py:\d+\) {said}"
    ):
        compile_case(NET, Plan(tp=2), 2)


def test_a_rule_of_torch_is_not_replaced():
    with pytest.raises(ValueError, match="operator add has a rule already"):
        rule("aten::add")(lambda op, *args: None)
    assert rule("own_ops::squash")(own_ops.squash_rule) is own_ops.squash_rule  # as where a notebook runs a cell again


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (lambda op, x: (op.sum(x[0], x[1]), Dims())[1], ("", "")),
        (lambda op, x: (op.whole(x[0], "sorts it"), op.sum(x[0], x[1]), Dims())[2], ("needs the rows whole", "")),
        (lambda op, x: op.unknown(), ("", "does not know this use")),
    ],
    ids=["sum", "whole", "unknown"],
)
def test_what_a_rule_says_of_rows(monkeypatch, answer, verdict):
    """A loss by an operator of one's own: a sum over all entries of [rows, tokens]."""
    add_up = torch.library.custom_op(
        "own_test::add_up", lambda x: x.sum(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    add_up.register_fake(lambda x: x.new_empty(()))
    add_up.register_autograd(lambda ctx, grad: grad.expand(2, 6))
    monkeypatch.setitem(registry._RULES, "own_test::add_up", answer)

    class Loss(own_ops.Net):
        def forward(self, ids):
            return add_up(super().forward(ids).square().mean(-1))

    units = compile_case(case(Loss, objective=lambda m, b: m(b["input_ids"]), loss=None, vocab=256), Plan(), 2).units
    assert units.summed == (verdict == ("", ""))
    assert all(
        part in said and bool(part) == bool(said)
        for part, said in zip(verdict, (units.coupled, units.unclear), strict=True)
    )


def test_a_sum_over_pairs_of_rows_couples_them(monkeypatch):
    """The rule sums over the rows of both operands, which are not the same rows."""
    pairs = torch.library.custom_op(
        "own_test::pairs", lambda x, y: x.sum() * y.sum(), mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    pairs.register_fake(lambda x, y: x.new_empty(()))
    pairs.register_autograd(lambda ctx, grad: (grad.expand(2), grad.expand(2)))
    monkeypatch.setitem(registry._RULES, "own_test::pairs", lambda op, x, y: (op.sum(x[0], y[0]), Dims())[1])

    class Loss(own_ops.Net):
        def forward(self, ids):
            x = super().forward(ids).square().mean((1, 2))
            return pairs(x, x * 1.0)

    units = compile_case(case(Loss, objective=lambda m, b: m(b["input_ids"]), loss=None, vocab=256), Plan(), 2).units
    assert "it brings different rows together" in units.coupled


def test_a_rule_that_lets_rows_meet_a_constant_entry_by_entry_couples_them(monkeypatch):
    """Each row is multiplied by its place in the batch."""
    times = torch.library.custom_op(
        "own_test::times", lambda x, y: x * y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    times.register_fake(lambda x, y: torch.empty_like(x))
    times.register_autograd(lambda ctx, grad: (grad, None))
    monkeypatch.setitem(registry._RULES, "own_test::times", lambda op, x, y: broadcast(x, y))

    def coupled(by):
        class Placed(own_ops.Net):
            def forward(self, ids):
                return times(super().forward(ids), by(len(ids))[:, None, None])

        return compile_case(case(Placed, vocab=256), Plan(), 2).units.coupled

    assert "own_test::times" in coupled(torch.arange) and "by their place" in coupled(torch.arange)
    assert coupled(torch.ones) == ""


@pytest.mark.dist
def test_rules_beside_a_model_are_found_by_worker_processes(tmp_path, monkeypatch):
    """The example in README.md, as its reader would run it."""
    blocks = [part.partition("```")[0] for part in README.read_text().split("```python\n")[1:]]
    (example,) = [block for block in blocks if "@meg_compile.rule" in block]
    (tmp_path / "mine.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    settings = ["task=verify", "precision=fp64", "plan=tp2", "model._target_=mine.Net", "verify.steps=1"]
    assert run.main([*settings, "data.seq_len=16", "train.global_batch_size=2", "hydra.run.dir=out"]) == 0
    assert json.loads(Path("out/result.json").read_text())["status"] == "ok"
    plan = json.loads(Path("out/plan.json").read_text())
    assert not plan["operators_without_a_rule"] and plan["flops"]["share"] == 1
