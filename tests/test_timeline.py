"""A step in time: bubbles against the papers' formulas, and the drawing."""

import pytest
from compare import compile_case
from zoo import ZOO

from meg_compile.explain.timeline import WIDTH, bubble, draw, figures, idle, simulate, timeline
from meg_compile.orders import orders
from meg_compile.plan import Plan
from meg_compile.schedules import SCHEDULES


def spans_of(name, pp, vpp, num, costs=None):
    return simulate(orders(name, pp, vpp, num), costs or [3.0] * (pp * vpp))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_bubbles_of_equal_stages(pp, rounds):
    """Narayanan et al. 2021, sections 2.2.1 and 2.2.2: (p - 1) / (m v) of the ideal time; here of all the time."""
    num = pp * rounds
    for name in ("1f1b", "gpipe"):
        assert bubble(spans_of(name, pp, 1, num)) == pytest.approx((pp - 1) / (num + pp - 1), abs=1e-12)
    for vpp in (2, 3):
        for name in ("interleaved_1f1b", "looped_bfs"):
            assert bubble(spans_of(name, pp, vpp, num)) == pytest.approx((pp - 1) / (num * vpp + pp - 1), abs=1e-12)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_backward_in_two_parts_leaves_a_third_of_the_bubble(pp):
    """Qi et al. 2023, section 2: the bubble is (p - 1) (F + I - W) long, and here F = I = W."""
    num = 4 * pp
    for name, vpp, parts in (
        ("interleaved_zero_bubble", 1, 3),
        ("interleaved_zero_bubble", 2, 6),
        ("zbv_zero_bubble", 2, 6),
        ("dualpipev", 2, 3),  # its pairs hold whole backwards: twice the bubble of ZB-V
    ):
        expected = (pp - 1) / (parts * num + pp - 1)
        assert bubble(spans_of(name, pp, vpp, num)) == pytest.approx(expected, abs=1e-12)


def test_a_dear_stage_leaves_the_others_idle():
    spans = spans_of("1f1b", 2, 1, 4, costs=[1.0, 2.0])
    step = 4 * 2 + 1  # the second stage's work, and the first one's forward and backward around it
    assert max(mine[-1].end for mine in spans) == pytest.approx(step)
    assert idle(spans) == pytest.approx([1 - 4 / step, 1 - 8 / step])


def test_an_action_starts_as_soon_as_it_can_and_no_sooner():
    for name, schedule in SCHEDULES.items():
        vpp = schedule.vpp or 2
        spans = spans_of(name, 4, vpp, 8, costs=[1.0 + s % 3 for s in range(4 * vpp)])
        forward = {(s.action.stage, s.action.micro_batch): s for mine in spans for s in mine if s.action.kind == "F"}
        backward = {(s.action.stage, s.action.micro_batch): s for mine in spans for s in mine if s.action.kind in "BI"}
        for mine in spans:
            for before, span in zip([None, *mine], mine, strict=False):
                stage, micro, kind = span.action.stage, span.action.micro_batch, span.action.kind
                after = [before] if before else []
                after += [forward[stage - 1, micro]] if kind == "F" and stage else []
                after += [forward[stage, micro]] if kind in "BI" else []
                after += [backward[stage + 1, micro]] if kind in "BI" and stage < 4 * vpp - 1 else []
                after += [backward[stage, micro]] if kind == "W" else []
                earliest = max((s.end for s in after), default=0.0)
                # of a pair in DualPipeV both results are sent after the second
                assert span.start == pytest.approx(earliest) or (name == "dualpipev" and span.start > earliest)


def test_the_drawing():
    assert draw(spans_of("1f1b", 2, 1, 2), 1) == [
        "  pp rank 0  F0 F1 ......B0--- ...B1---",
        "  pp rank 1  ...F0 B0--- F1 B1--- ......",
    ]
    assert draw(spans_of("zbv_zero_bubble", 2, 2, 1), 2) == [
        "  pp rank 0  F0a ........F0b I0b W0b ........I0a W0a",
        "  pp rank 1  ....F0a F0b ........I0b W0b I0a W0a ....",
    ]


def test_a_wide_drawing_is_cut_off():
    lines = draw(spans_of("1f1b", 32, 1, 64), 1)
    assert max(map(len, lines)) <= WIDTH + len("  pp rank 15 ")
    assert lines[-2:] == ["  ... cut off after 27 of 285 units of time", "  ... and 16 more ranks"]


def test_what_a_program_shows():
    program = compile_case(ZOO["gpt2_4"], Plan(pp=2, vpp=2, schedule="interleaved_1f1b"), 1)
    found = figures(program, 4)
    assert found is not None
    assert program.to_dict(4)["timeline"] == found
    assert found["bubble_of_equal_stages"] == pytest.approx(1 / 9)
    assert found["bubble"] == pytest.approx(sum(found["idle_by_pp_rank"]) / 2)
    text = program.explain(4)
    assert "Schedule interleaved_1f1b of 4 micro-batches" in text and "pp rank 1  ....F0a F1a F0b" in text
    assert "11.1% if all stages cost the same" in text
    assert "5 micro-batches do not fill 2 rounds" in timeline(program, 5) and "4 or 6 would do" in timeline(program, 5)
    assert figures(program, 5) is None and program.to_dict(5)["timeline"] is None


def test_one_stage_has_no_timeline():
    program = compile_case(ZOO["gpt2_4"], Plan(), 1)
    assert "Schedule" not in program.explain(4) and program.to_dict(4)["timeline"] is None
