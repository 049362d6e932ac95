import pytest

from meg_compile.errors import CaptureError, Fault, MegError, RankFailed, Refused, nearest

HEADS = Fault("plan.tp", 5, "6 heads do not divide by 5", "use 1, 2, 3 or 6")
SOURCE = Fault("model.py:12", None, "a custom autograd.Function would lose its backward")


def test_fault_names_key_value_problem_and_fix():
    assert str(HEADS) == "plan.tp=5: 6 heads do not divide by 5; use 1, 2, 3 or 6"
    assert str(SOURCE) == "model.py:12: a custom autograd.Function would lose its backward"


def test_refusal_holds_every_fault_under_one_heading():
    lines = str(Refused([HEADS, SOURCE])).splitlines()
    assert lines == ["This configuration cannot run (2 faults):", f"  {HEADS}", f"  {SOURCE}"]
    assert str(Refused(HEADS)).splitlines() == ["This configuration cannot run:", f"  {HEADS}"]
    with pytest.raises(AssertionError):
        Refused([])


def test_exit_codes():
    assert Refused(HEADS).exit_code == 2
    assert CaptureError(SOURCE).exit_code == 2
    assert RankFailed(3, "Traceback").exit_code == 1
    assert issubclass(RankFailed, MegError) and issubclass(Refused, MegError)


def test_rank_failure_shows_whose_and_what():
    error = RankFailed(3, "Traceback ...\nValueError: no")
    assert (error.rank, error.text) == (3, "Traceback ...\nValueError: no")
    assert str(error).startswith("rank 3 failed:\nTraceback")


def test_nearest():
    assert nearest("tpp", ["tp", "pp", "schedule"]) == "tp"
    assert nearest("shedule", ["tp", "pp", "schedule"]) == "schedule"
    assert nearest("zzz", ["tp", "pp"]) is None
