"""Which axes are cut, and why the others are not."""

from functools import partial

import pytest
import torch
from compare import compile_case
from torch import nn
from zoo import ZOO, case, gpt2, lm
from zoo_layers import Chain, Grouped, NormedFfn
from zoo_models import Lm

from meg_compile.errors import Refused
from meg_compile.plan import Plan


def cut(program):
    return {name for name, spec in program.params.items() if spec.sharded}


def kinds(program):
    return sorted({("/".join(sorted(a.names)), a.size) for a in program.choice.layout.sharded})


def test_gpt2_is_cut_by_heads_ffn_and_vocabulary():
    assert kinds(compile_case(ZOO["gpt2_thirds_tied"], Plan(tp=2), 2)) == [("ffn", 64), ("heads", 4), ("vocab", 32)]


def test_one_rank_cuts_nothing():
    program = compile_case(ZOO["gpt2_thirds_tied"], Plan(pp=2), 2)
    assert not program.choice.layout.sharded and not cut(program)


@pytest.mark.parametrize("tp", [2, 4])
def test_no_tensor_is_cut_twice(tp):
    for name in ("gpt2_thirds_tied", "chain", "experts", "lora", "talking_heads", "mixer"):
        program = compile_case(ZOO[name], Plan(tp=tp, strict=False), 2)
        for spec in program.params.values():
            assert sum(a != b for a, b in zip(spec.shape, spec.local_shape, strict=True)) <= 1, name


def test_of_a_chain_every_other_axis_is_cut():
    program = compile_case(ZOO["chain"], Plan(tp=4), 2)
    assert "of the same tensor is sharded" in " ".join(program.choice.refused.values())


def test_an_axis_that_meets_itself_stays_whole():
    class Square(nn.Module):
        """The product of a value with itself over the same axis: it would stand twice in the scores."""

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)

        def forward(self, x):
            h = self.up(x)
            scores = torch.einsum("bti,btj->bij", h, h)
            return self.down(torch.einsum("bij,btj->bti", scores, h) * 0.1)

    program = compile_case(case(lm(mlp=Square)), Plan(tp=2), 2)
    assert not any("mlp" in name for name in cut(program))


@pytest.mark.parametrize(("vocab", "tp"), [(5, 2), (5, 4), (101, 2), (101, 4), (33, 4)])
def test_a_vocabulary_is_padded_where_tp_does_not_divide_it(vocab, tp):
    program = compile_case(case(lm(vocab=vocab), vocab=vocab), Plan(tp=tp), 2)
    assert program.params["wte.weight"].local_shape == (-(-vocab // tp), 16)
    assert program.params["head.weight"].local_shape == (-(-vocab // tp), 16)


def test_logits_that_are_only_compared_keep_the_vocabulary_whole():
    """A soft-max over the vocabulary by hand needs it whole; the rest is cut all the same."""
    program = compile_case(ZOO["log_prob_loss"], Plan(tp=2), 2)
    assert "head.weight" not in cut(program) and "wte.weight" in cut(program)


def test_what_cannot_be_cut_is_in_the_choice_with_its_reason():
    program = compile_case(case(lm(partial(Grouped, heads=4, kv=2))), Plan(tp=4, strict=False), 1)
    assert any("tp=4 does not divide 2" in reason for reason in program.choice.refused.values())


def test_a_refusal_lists_all_that_does_not_divide():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 30), nn.Linear(30, 16)

        def forward(self, x):
            return self.fc2(torch.relu(self.fc1(x)))

    with pytest.raises(Refused) as caught:
        compile_case(case(lm(partial(Grouped, heads=2, hidden=16), Odd)), Plan(tp=4), 1)
    text = str(caught.value)
    assert "30 ffn of h.0.mlp.fc1.weight" in text and "1, 2, 3, 5, 6, 10, 15 or 30" in text
    assert "plan.strict=false" in text


def test_an_axis_that_no_tp_could_cut_is_no_reason_to_refuse():
    """Entries of the axis are picked one by one, so it stays whole at tp=2 and, just so, at tp=4."""
    model = case(lm(mlp=partial(NormedFfn, "pick")))
    assert cut(compile_case(model, Plan(tp=2), 1)) == cut(compile_case(model, Plan(tp=4), 1))


def test_a_frozen_pair_is_not_worth_cutting():
    class Frozen(Lm):
        def __init__(self):
            super().__init__()
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("h." not in name or ".attn." in name)

    program = compile_case(case(Frozen), Plan(tp=2), 1)
    assert not any(".mlp." in name for name in cut(program)) and any(".attn." in name for name in cut(program))


def test_weight_decides_between_axes_that_meet():
    """Of neighbours in a chain the one with more weight around it is cut."""
    program = compile_case(case(lm(mlp=partial(Chain, (16, 8, 64, 8, 16)))), Plan(tp=2), 1)
    assert {"h.0.mlp.maps.1.weight", "h.0.mlp.maps.1.bias", "h.0.mlp.maps.2.weight"} <= cut(program)
    assert "h.0.mlp.maps.0.weight" not in cut(program)


def test_the_choice_is_the_same_every_time():
    first, second = (compile_case(case(gpt2(layers=2)), Plan(tp=2), 1) for _ in range(2))
    assert cut(first) == cut(second) and kinds(first) == kinds(second)
