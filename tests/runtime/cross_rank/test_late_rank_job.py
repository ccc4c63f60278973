"""Real jobs with a rank that is late each step: a TrainingRun and a plain watch measure the same.

Seconds are compared relative to the delay, which is far longer than anything else in a step. They
are those of the step that a busy machine disturbs least.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

TOLERANCE = 0.06  # of the delay
CASES = [(late, place) for late in (0, 1) for place in ("data", "script")]
each_case = pytest.mark.parametrize(
    ("late", "place"), tiers(CASES, quick=[(0, "data"), (1, "script")])
)

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Found]:
    folder = tmp_path_factory.mktemp("late")
    script = SCRIPTS / "cross_rank" / "late_rank_job.py"
    cases = [f"{late}:{place}" for late, place in chosen(request, "late", "place") or CASES]

    finished = start_ranks(2, script, folder, *cases, cwd=folder)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def case_of(rank: Found, how: str, late: int, place: str) -> Found:
    found: Found = rank[how][f"rank {late}, {place}"]
    return found


def error_of_wait(ranks: list[Found], how: str, late: int, place: str) -> float:
    """Return by how much the wait differs from the delay, in the step in which it differs least.

    The wait is by how much longer the other rank was blocked than the late one: both are blocked as
    long for the transfer. On a busy machine either rank waits for the processor in most steps.
    """
    waiting, delayed = (case_of(ranks[each], how, late, place) for each in (1 - late, late))
    steps = zip(waiting["exposed"], delayed["exposed"], delayed["slept"][1:], strict=True)
    return min(abs(one - other - slept) for one, other, slept in steps)


@each_case
def test_the_other_rank_is_blocked_for_the_delay(ranks, late, place):
    for how in ("watch", "run"):
        assert error_of_wait(ranks, how, late, place) < TOLERANCE * ranks[0]["delay"]


@pytest.mark.parametrize("how", ["watch", "run"])
def test_imbalance_is_the_delay(ranks, how):
    for rank in ranks:
        imbalance, exposed = rank[how]["imbalance"], rank[how]["all exposed"]

        # Totals: each rank also waits for the other when the machine is busy.
        assert (1 - TOLERANCE) * rank["total delay"] < imbalance <= exposed + 1e-6


@each_case
def test_phases_without_waiting_are_the_same(ranks, late, place):
    for rank in ranks:
        watched, run = (case_of(rank, how, late, place)["busy"] for how in ("watch", "run"))

        assert run == pytest.approx(watched, abs=TOLERANCE * rank["delay"])


@each_case
def test_the_late_rank_has_the_same_score(ranks, late, place):
    for number, rank in enumerate(ranks):
        watched, run = (case_of(rank, how, late, place) for how in ("watch", "run"))
        delay, slow = rank["delay"], float(number == late)
        slow_phase = "data" if place == "data" else "other"

        for case in (watched, run):  # in delays, as a busy machine makes a step longer
            scores = {
                phase: score * case["step_seconds"] / delay
                for phase, score in case["scores"].items()
            }
            assert scores.pop(slow_phase) == pytest.approx(slow, abs=2 * TOLERANCE)
            assert max(scores.values()) < TOLERANCE


def test_the_wait_is_of_the_own_group_whose_operations_are_not_counted_as_the_trainings(ranks):
    for rank in ranks:
        own = 0.0
        for case in rank["cases"]:
            watched, run = (case_of(rank, how, *case) for how in ("watch", "run"))
            assert "zerowatch" not in watched["exposed_by_group"]
            assert run["operations"] == watched["operations"]
            own += run["exposed_by_group"]["zerowatch"]
            assert not watched["own_by_phase"]
            assert sum(run["own_by_phase"].values()) == pytest.approx(
                run["exposed_by_group"]["zerowatch"]
            )
        assert own >= (1 - TOLERANCE) * rank["total delay"]


def test_all_calls_are_recorded_and_matched_and_all_functions_restored(ranks):
    for rank in ranks:
        assert rank["restored"]
        for how in ("watch", "run"):
            assert rank[how]["coverage"] == 1.0
            assert not rank[how]["unmatched"]
