"""Tests of how the chaos bench draws its faults and what it finds: `bench/chaos`."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from bench.chaos import planned_faults
from bench.chaos.figure_checks import FigureChecks
from bench.chaos.job_checks import (
    Course,
    failed_scrapes,
    growths,
    longest_pause,
    next_step_seconds,
    plan_of,
    refused_without_reason,
    resident_growth_by_fault,
    wrong_losses,
    wrong_samples,
)
from bench.chaos.observations import LAUNCHER, Event, PlantedFault, Reading, Scrape
from bench.chaos.planned_faults import KILL, LASTS, STOP, Fault, draw

RANKS, SAMPLES, BATCH = 2, 24, 4
BATCHES = 12  # two epochs
SKIPPED = 5


@pytest.mark.parametrize("minutes", [4.0, 30.0, 120.0])
@pytest.mark.parametrize("seed", [planned_faults.SEED, 1, 2])
def test_each_kind_of_fault_occurs_in_order_of_time(minutes: float, seed: int) -> None:
    faults = draw(seed, minutes)

    assert {fault.kind for fault in faults} == set(LASTS)
    assert faults == sorted(faults, key=lambda fault: fault.at_seconds)
    assert faults[-1].at_seconds + faults[-1].lasts_seconds < 60 * minutes
    assert faults == draw(seed, minutes)


def test_half_an_hour_has_a_fault_every_three_minutes() -> None:
    assert [int(fault.at_seconds // 180) for fault in draw(planned_faults.SEED, 30)] == [*range(10)]


def test_in_two_hours_memory_runs_out_in_both_passes() -> None:
    details = {fault.detail for fault in draw(planned_faults.SEED, 120)}

    assert {"forward", "backward", "+3600", "-3600"} <= details


def batch(rank: int, position: int) -> list[int]:
    epoch, number = divmod(position, SAMPLES // BATCH)
    order = random.Random(epoch).sample(range(SAMPLES), SAMPLES)
    return order[number * BATCH : (number + 1) * BATCH][rank::RANKS]


def train(rank: int, first: int, last: int, *, attempt: int = 0, at: float = 0.0) -> list[Event]:
    """Return the events of an attempt; the batch at SKIPPED has a NaN."""
    own = {"attempt": attempt}
    step = first - (first > SKIPPED)
    events: list[Event] = [
        {"what": "started", "pid": 100 * attempt + rank + 1, "at": at, **own},
        {"what": "resumed", "step": step, "position": first, "at": at, **own},
    ]
    for position in range(first, last):
        at += 1.0
        found = {"position": position, "ids": batch(rank, position), "at": at, **own}
        if position == SKIPPED:
            events.append({"what": "skipped", **found})
            continue
        step += 1
        sizes = [1, 1] if step == 3 else [2]
        figures: dict[str, Any] = {"loss": 1 / step, "micro_batches": sizes, "replays": step == 3}
        events.append({"what": "committed", "step": step, **found, **figures})
    return events


@pytest.fixture
def events() -> list[list[Event]]:
    """Events of ranks that trained on nine batches, and were restarted at the fourth."""
    return [
        train(rank, 0, 9) + train(rank, 4, BATCHES, attempt=1, at=20.0) for rank in range(RANKS)
    ]


def courses(events: list[list[Event]]) -> list[Course]:
    return [Course.of(own) for own in events]


def test_a_restarted_course_is_that_of_the_last_attempt(events: list[list[Event]]) -> None:
    for course in courses(events):
        assert list(course.committed) == list(range(1, BATCHES))
        assert [event["attempt"] for event in course.committed.values()] == [0] * 4 + [1] * 7
        assert list(course.skipped) == [SKIPPED]
        assert course.skipped[SKIPPED]["attempt"] == 1


def test_samples_of_a_restarted_run_are_seen_once(events: list[list[Event]]) -> None:
    assert wrong_samples(courses(events), SAMPLES, BATCH) == []


@pytest.mark.parametrize("what", ["lost", "repeated", "other", "skipped too"])
def test_a_wrong_sample_is_found(events: list[list[Event]], what: str) -> None:
    own = events[1]
    if what == "lost":
        own.pop()
    elif what == "repeated":
        own.append(own[-1] | {"step": own[-1]["step"] + 1})
    elif what == "other":
        own[-1]["ids"] = own[-2]["ids"]
    else:
        own.append(own[-1] | {"what": "skipped"})

    assert wrong_samples(courses(events), SAMPLES, BATCH)


def test_the_plan_has_the_micro_batches_of_all_ranks(events: list[list[Event]]) -> None:
    plan = plan_of(courses(events), {str(SKIPPED): 0})

    assert plan == {
        "last_step": BATCHES - 1,
        "micro_batch_samples": {"1": 2, "3": 1, "4": 2},
        "nan": {str(SKIPPED): 0},
    }


def test_equal_runs_have_no_wrong_losses(events: list[list[Event]]) -> None:
    through = [train(rank, 0, BATCHES) for rank in range(RANKS)]

    assert wrong_losses(courses(events), courses(through)) == []


@pytest.mark.parametrize("name", ["loss", "ids", "micro_batches"])
def test_the_first_wrong_step_is_named(events: list[list[Event]], name: str) -> None:
    other = copy.deepcopy(events)
    other[1][-2][name] = other[1][-1][name] = [7]

    assert wrong_losses(courses(events), courses(other)) == [f"rank 1: {name} from step 10 on"]


def fault(
    kind: str, began: float, ended: float, recovered: float, restarts: int = 0
) -> PlantedFault:
    return PlantedFault(
        fault=Fault(kind=kind, at_seconds=0.0, lasts_seconds=0.0, rank=1),
        began=began,
        ended=ended,
        recovered=recovered,
        restarts=restarts,
    )


def test_saves_may_be_refused_until_the_first_one_after_a_full_disk() -> None:
    times = {"saved": (1.0, 9.0, 24.0), "not_saved": (5.0, 12.0, 21.0, 30.0)}
    events: list[Event] = [{"what": what, "at": at} for what, own in times.items() for at in own]

    refused = refused_without_reason(events, [fault(planned_faults.FULL_DISK, 10.0, 20.0, 20.5)])

    assert [event["at"] for event in refused] == [5.0, 30.0]


def test_the_next_step_after_a_kill_is_one_of_the_next_attempt(events: list[list[Event]]) -> None:
    killed = fault(KILL, 8.5, 21.0, 25.0, restarts=1)

    # Step 8 comes at 9 s, 0.5 s after the kill, on the rank that was not killed.
    assert next_step_seconds(killed, events) == 12.5
    assert longest_pause(killed, events) == 12.0


def test_the_next_step_is_that_of_the_slower_rank(events: list[list[Event]]) -> None:
    for event in events[1][-3:]:
        event["at"] += 4.0
    stopped = fault(STOP, 25.6, 29.0, 35.0)

    assert next_step_seconds(stopped, events) == pytest.approx(4.4)


def test_a_fault_that_was_ordered_begins_when_a_rank_reports_it(events: list[list[Event]]) -> None:
    skipped = fault(planned_faults.NAN_BATCH, 20.5, 22.0, 26.0)

    # The second batch of the last attempt is skipped, at 22 s.
    assert next_step_seconds(skipped, events) == 1.0


def reading(at: float, mib: int, pid: int = 9, rank: int = -1, descriptors: int = 5) -> Reading:
    return Reading(
        at=at,
        rank=rank,
        pid=pid,
        resident_bytes=mib * 2**20,
        descriptors=descriptors,
        threads=3,
    )


# A thousand windows to warm up, of which the last is at 99.9 s, and 500 more.
STEPS: list[Event] = [
    {"what": "started", "pid": 9, "at": 0.0},
    *({"what": "committed", "at": number / 10} for number in range(1500)),
]


def test_growth_is_read_outside_of_faults_only() -> None:
    levels = [10, 10, 10, 90, 10, 12, 12]
    readings = [reading(100.0 + at, mib, descriptors=mib) for at, mib in enumerate(levels)]
    start = reading(50.0, 1)

    (growth,) = growths([start, *readings], [fault(STOP, 102.5, 103.1, 103.2)], [STEPS])

    assert growth.resident_bytes == 2 * 2**20
    assert growth.late_resident_bytes == 0
    assert growth.descriptors == 2
    assert growth.threads == 0
    assert growth.seconds == 6.0


def test_growth_of_a_rank_begins_after_its_first_windows() -> None:
    readings = [reading(float(at), at, rank=0) for at in range(90, 111)]

    (growth,) = growths(readings, [], [STEPS])

    assert growth.seconds == 10.0


def test_growth_over_a_fault_leaves_out_restarted_ranks_and_readings_during_the_fault() -> None:
    faults = [fault(STOP, 103.0, 104.0, 105.0), fault(KILL, 110.0, 111.0, 112.0)]
    mib = {100: 9, 101: 10, 102: 10, 104: 90, 106: 50, 107: 13, 108: 13, 109: 13}
    mib |= {113: 12, 114: 12, 115: 12}
    readings = [reading(float(at), each, rank=1) for at, each in mib.items()]
    readings += [reading(float(at), at, rank=LAUNCHER) for at in mib]
    restarted = [reading(float(at), 1, rank=0, pid=at // 110) for at in mib]

    found = resident_growth_by_fault([*readings, *restarted], faults)

    assert found == [{0: 0, 1: 3 * 2**20}, {1: -(2**20)}]


def exposition(total: float, level: float) -> str:
    return (
        f'# TYPE steps counter\nsteps_total{{rank="0"}} {total}\n'
        f"# TYPE level gauge\nlevel {level}\n# EOF\n"
    )


def test_sane_figures_are_found_sane() -> None:
    checks = FigureChecks()

    for text in (exposition(1, 5), exposition(1, 4), exposition(3, 5)):
        checks.add(0, 9, text)

    assert checks.wrong == []


@pytest.mark.parametrize(("pid", "wrong"), [(9, ["rank 0: steps_total fell"]), (10, [])])
def test_a_counter_that_falls_within_a_process_is_found(pid: int, wrong: list[str]) -> None:
    checks = FigureChecks()

    checks.add(0, 9, exposition(2, 5))
    checks.add(0, pid, exposition(1, 5))

    assert checks.wrong == wrong


def test_a_figure_that_is_no_number_is_found() -> None:
    checks = FigureChecks()

    checks.add(0, 9, exposition(1, float("nan")))

    assert checks.wrong == ["rank 0: level is NaN"]


def scrape(at: float, error: str | None = "timed out") -> Scrape:
    return Scrape(at=at, seconds=0.1, error=error)


def test_only_stopped_and_starting_ranks_may_leave_a_scrape_without_an_answer() -> None:
    steps: list[Event] = [{"what": "committed", "at": at} for at in (1.0, 70.0)]
    stopped, restarted = fault(STOP, 10, 20, 21), fault(KILL, 30, 31, 40, restarts=1)
    slow = fault(planned_faults.SLOW_CLIENTS, 50, 60, 61)
    scrapes = [scrape(at) for at in (0.5, 5.0, 9.95, 15.0, 35.0, 55.0, 80.0)]

    failed = failed_scrapes([*scrapes, scrape(5.0, None)], [stopped, restarted, slow], [steps])

    assert [one.at for one in failed] == [5.0, 55.0]
