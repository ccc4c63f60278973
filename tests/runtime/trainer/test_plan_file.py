"""What a restart goes by: the plan in force, and what the processes before it died of."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from scripts.resume_engine import SingleRankHostGroup

from zerowatch.runtime.trainer.checkpoint.plan_file import Failure, PersistedPlan, PlanFile

ALONE = SingleRankHostGroup()
PLAN = {"wanted": 8, "sizes": {7: 4, 8: 2}, "failing": {7: 8}}


def test_a_plan_comes_back_with_its_whole_numbers(tmp_path: Path) -> None:
    PlanFile(tmp_path / "runs" / "night").write(PLAN, steps=12, config={"stage": 3})

    plan = PlanFile(tmp_path / "runs" / "night").read(ALONE)

    assert plan == PersistedPlan(steps=12, plan=PLAN, config={"stage": 3})


def test_the_first_attempt_finds_none(tmp_path: Path) -> None:
    assert PlanFile(tmp_path).read(ALONE) is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_died_of_is_added_to_the_plan(tmp_path: Path) -> None:
    PlanFile(tmp_path).write(PLAN, steps=12)

    PlanFile(tmp_path).add_failure(length=200, samples=2)
    PlanFile(tmp_path).add_failure(length=100, samples=4)
    PlanFile(tmp_path).add_failure(length=200, samples=2)

    plan = PlanFile(tmp_path).read(ALONE)
    assert plan is not None
    assert plan.plan == PLAN
    assert plan.failures == (Failure(length=100, samples=4), Failure(length=200, samples=2))


def test_death_before_any_plan_is_noted_too(tmp_path: Path) -> None:
    PlanFile(tmp_path).add_failure(length=100, samples=4)

    plan = PlanFile(tmp_path).read(ALONE)

    assert plan == PersistedPlan(failures=(Failure(length=100, samples=4),))


def test_a_later_plan_has_worked_in_what_was_read_and_nothing_else(tmp_path: Path) -> None:
    PlanFile(tmp_path).add_failure(length=100, samples=4)
    second_attempt = PlanFile(tmp_path)
    second_attempt.read(ALONE)

    PlanFile(tmp_path).add_failure(length=300, samples=2)  # another rank, dying meanwhile
    second_attempt.write(PLAN, steps=3)

    plan = PlanFile(tmp_path).read(ALONE)
    assert plan is not None
    assert plan.failures == (Failure(length=300, samples=2),)


def test_ranks_that_die_at_the_same_time_all_leave_their_word(tmp_path: Path) -> None:
    together = Barrier(8)

    def die(rank: int) -> None:
        together.wait()
        PlanFile(tmp_path).add_failure(length=rank, samples=1)

    with ThreadPoolExecutor(8) as ranks:
        list(ranks.map(die, range(8)))

    plan = PlanFile(tmp_path).read(ALONE)
    assert plan is not None
    assert [failure.length for failure in plan.failures] == list(range(8))


def test_nodes_with_disks_of_their_own_go_by_the_newest_plan_and_all_failures(
    tmp_path: Path,
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    PlanFile(here).write(PLAN, steps=12)
    PlanFile(there).write({"wanted": 2}, steps=30)
    PlanFile(here).add_failure(length=100, samples=4)

    for own, other in ((here, there), (there, here)):
        plan = PlanFile(own).read(_Two((other / "plan.json").read_text()))
        assert plan == PersistedPlan(
            steps=30, plan={"wanted": 2}, failures=(Failure(length=100, samples=4),)
        )


class _Two:
    """The view of rank 1 of two, where rank 0 says a text."""

    rank = 1

    def __init__(self, text: str) -> None:
        self._text = text

    def all_gather_text(self, text: str) -> list[str]:
        return [self._text, text]


def test_a_run_without_a_folder_has_no_plan_file() -> None:
    plans = PlanFile(None)

    plans.write(PLAN, steps=1)
    plans.add_failure(length=1, samples=1)

    assert plans.read(ALONE) is None


def test_what_cannot_be_read_is_told_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan.json").write_text("{")

    with caplog.at_level(logging.WARNING):
        assert PlanFile(tmp_path).read(ALONE) is None

    assert "plan.json cannot be read" in caplog.text


def test_what_cannot_be_written_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    plans = PlanFile(tmp_path / "file")

    with caplog.at_level(logging.WARNING):
        plans.write(PLAN, steps=1)
        plans.write(PLAN, steps=2)

    assert caplog.text.count("a restart would not know what ran out of memory") == 1


def test_a_configuration_without_words_in_json_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        PlanFile(tmp_path).write(PLAN, steps=1, config={"dtype": object()})

    assert "a restart would not know" in caplog.text


def test_the_file_reads_well(tmp_path: Path) -> None:
    PlanFile(tmp_path).write({"wanted": 8, "failing": {7: 8}}, steps=12)

    assert json.loads((tmp_path / "plan.json").read_text()) == {
        "steps": 12,
        "plan": {"wanted": 8, "failing": {"7": 8}},
        "config": None,
        "failures": [],
    }
