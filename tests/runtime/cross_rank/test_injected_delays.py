"""A real job of two ranks, one of which is delayed by 70 ms in one phase after the other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

PHASES = ("data", "forward", "backward", "optimizer", "other")
CONTROLS = [f"control {number}" for number in range(8)]
QUICK = ("data", CONTROLS[0])
# A rank that had no core for so much of the time was slowed by other processes, not by the job.
STARVED_RATIO = 0.02
NAMED = re.compile(r"rank (\d+) is slow in (\w+):")


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, dict[str, Any]]]:
    """What each rank has seen by case: a delay in each phase, then controls without one."""
    folder = tmp_path_factory.mktemp("delays")
    script = SCRIPTS / "cross_rank" / "straggler_job.py"
    cases = {case for name in ("phase", "control", "case") for case in chosen(request, name)}

    finished = start_ranks(2, script, folder, *sorted(cases), cwd=folder)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def named(case: dict[str, Any]) -> list[tuple[str, ...]]:
    return [found.groups() for line in case["lines"] if (found := NAMED.match(line))]


@pytest.mark.parametrize("phase", tiers(PHASES, QUICK[:-1]))
def test_only_the_delayed_rank_is_named_with_its_phase(ranks, phase):
    first, second = (cases[phase] for cases in ranks)

    assert set(named(first)) == {("1", phase)}
    assert named(second) == []  # rank 0 logs for both


@pytest.mark.parametrize("phase", tiers(PHASES, QUICK[:-1]))
def test_the_delayed_rank_is_named_after_two_comparisons(ranks, phase):
    case = ranks[0][phase]

    lines = zip(case["lines"], case["comparisons"], strict=True)
    before = next(comparisons for line, comparisons in lines if NAMED.match(line))
    # Of the comparisons in which the delay shows. If it is in little more than half of the steps,
    # they differ too much for the first one to count.
    assert before in (2, 3), case["lines"]


@pytest.mark.parametrize("phase", tiers(PHASES, QUICK[:-1]))
def test_the_other_rank_has_waited_as_long_as_the_delays(ranks, phase):
    waiting, delayed = (cases[phase] for cases in ranks)

    # A rank that gets no core is late as well, which the kernel counts.
    slept, starved = delayed["slept"], waiting["starved"] + delayed["starved"]
    extra = waiting["waited"] - delayed["waited"]
    assert abs(extra - slept) < 0.1 * slept + starved
    assert delayed["waited"] < 0.3 * slept + waiting["starved"]


@pytest.mark.parametrize("phase", tiers(PHASES, QUICK[:-1]))
def test_only_the_delayed_rank_scores_in_only_that_phase(ranks, phase):
    first, second = (cases[phase]["score"] for cases in ranks)

    assert max(first.values()) < 0.2
    assert second[phase] > 0.5
    assert max(score for other, score in second.items() if other != phase) < 0.2


@pytest.mark.parametrize("control", tiers(CONTROLS, QUICK[-1:]))
def test_no_rank_is_named_where_none_is_delayed(ranks, control):
    seen = [cases[control] for cases in ranks]

    starved = {rank for rank, case in enumerate(seen) if case["starved_ratio"] > STARVED_RATIO}
    assert {int(rank) for case in seen for rank, _ in named(case)} <= starved
    assert all(len(case["score"]) == len(PHASES) for case in seen)  # they were compared


@pytest.mark.parametrize("case", tiers([*PHASES, *CONTROLS], QUICK))
def test_causes_add_up_to_what_was_exposed(ranks, case):
    for cases in ranks:
        seen = cases[case]

        assert sum(seen["cause"].values()) == pytest.approx(sum(seen["exposed"].values()), abs=1e-9)
        assert min(seen["cause"].values()) >= 0
        assert seen["failures"].get("unmatched", 0) == 0
