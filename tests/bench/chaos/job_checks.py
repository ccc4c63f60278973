"""Checks what the disturbed run recorded: samples, losses, pauses, leaks and scrapes.

Plain functions on events and readings. What they find wrong are words that fit into a cell of the
table; an empty list means that nothing is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from bench.chaos.observations import LAUNCHER, Event, PlantedFault, Reading, Scrape
from bench.chaos.planned_faults import NAN_BATCH, OUT_OF_MEMORY, STOP

# Windows of a process before its growth counts. Without faults the job grows by 13 to 28 MiB in its
# first 1,000 windows, while rings and histories fill, and by 0.2 KiB a window after them.
WARM_UP_WINDOWS = 1000
# Readings that the first and the last value are medians of.
MEDIAN_OF = 3
# The events that report faults which the bench orders for a later window.
REPORTED_AS = {OUT_OF_MEMORY: "scarce", NAN_BATCH: "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a rank has trained in the end: by step the last commit, by position the last skip."""

    committed: Mapping[int, Event]
    skipped: Mapping[int, Event]

    @staticmethod
    def of(events: Sequence[Event]) -> Course:
        """Return the course of a rank's events: a restart replaces what it does again."""
        committed: dict[int, Event] = {}
        skipped: dict[int, Event] = {}
        for event in events:
            if event["what"] == "resumed":
                committed = {n: one for n, one in committed.items() if n <= event["step"]}
                skipped = {n: one for n, one in skipped.items() if n < event["position"]}
            elif event["what"] == "committed":
                committed[event["step"]] = event
            elif event["what"] == "skipped":
                skipped[event["position"]] = event
        return Course(committed=committed, skipped=skipped)

    @property
    def last_step(self) -> int:
        return max(self.committed, default=0)

    def by_position(self) -> dict[int, Sequence[int]]:
        """Return the samples of each batch that was trained on or skipped."""
        events = [*self.committed.values(), *self.skipped.values()]
        return {event["position"]: event["ids"] for event in events}


def wrong_samples(courses: Sequence[Course], num_samples: int, batch_samples: int) -> list[str]:
    """Return what is wrong with the samples of all ranks: each epoch has each sample once."""
    wrong = []
    batches = [course.by_position() for course in courses]
    for rank, (course, own) in enumerate(zip(courses, batches, strict=True)):
        if list(course.committed) != list(range(1, course.last_step + 1)):
            wrong.append(f"rank {rank}: a step is missing")
        if len(own) != len(course.committed) + len(course.skipped):
            wrong.append(f"rank {rank}: a batch was both trained on and skipped, or twice")
        if sorted(own) != list(range(len(own))):
            wrong.append(f"rank {rank}: a batch is missing")
    if len({len(own) for own in batches}) > 1:
        wrong.append("the ranks had different numbers of batches")
    if wrong:
        return wrong
    batches_per_epoch = num_samples // batch_samples
    for epoch in range(len(batches[0]) // batches_per_epoch):
        positions = range(epoch * batches_per_epoch, (epoch + 1) * batches_per_epoch)
        seen = sorted(each for own in batches for position in positions for each in own[position])
        if seen != list(range(num_samples)):
            wrong.append(f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} of them different")
    return wrong


def plan_of(courses: Sequence[Course], nan: Mapping[str, int]) -> dict[str, Any]:
    """Return the plan of an undisturbed run that cuts and skips what the disturbed run did.

    Args:
        courses: Of all ranks.
        nan: The rank with a NaN, by the position of the batch.
    """
    largest = {
        step: max(max(course.committed[step]["micro_batches"]) for course in courses)
        for step in courses[0].committed
    }
    changes = {
        str(step): largest[step]
        for before, step in pairwise([0, *largest])
        if largest[step] != largest.get(before)
    }
    return {"last_step": courses[0].last_step, "micro_batch_samples": changes, "nan": nan}


def wrong_losses(disturbed: Sequence[Course], undisturbed: Sequence[Course]) -> list[str]:
    """Return the first differences of two runs: in samples, micro-batches or bits of the loss."""
    wrong = []
    for rank, (one, other) in enumerate(zip(disturbed, undisturbed, strict=True)):
        if one.committed.keys() != other.committed.keys():
            wrong.append(f"rank {rank}: {one.last_step} and {other.last_step} steps")
            continue
        if one.skipped.keys() != other.skipped.keys():
            wrong.append(f"rank {rank}: other batches were skipped")
        for step, event in one.committed.items():
            names = [
                name
                for name in ("ids", "micro_batches", "loss")
                if event[name] != other.committed[step][name]
            ]
            if names:
                wrong.append(f"rank {rank}: {' and '.join(names)} from step {step} on")
                break
    return wrong


def refused_without_reason(
    events: Sequence[Event], full_disks: Sequence[PlantedFault]
) -> list[Event]:
    """Return the saves of a rank that were refused while there was space on the disk.

    What cannot be written in the background is an error of the next save, which may come after the
    disk is free again.
    """
    saved = [event["at"] for event in events if event["what"] == "saved"]
    periods = [
        (one.began, min((at for at in saved if at > one.ended), default=math.inf))
        for one in full_disks
    ]
    return [
        event
        for event in events
        if event["what"] == "not_saved"
        and not any(began <= event["at"] <= ended for began, ended in periods)
    ]


def next_step_seconds(planted: PlantedFault, events: Sequence[Sequence[Event]]) -> float:
    """Return the seconds from a fault to the next step of the last rank that had one.

    If the fault led to restarts, steps of the attempts before them do not count. A fault that the
    bench orders begins when a rank reports it.
    """
    reports = [
        event["at"]
        for own in events
        for event in own
        if event["at"] > planted.began and event["what"] == REPORTED_AS.get(planted.fault.kind)
    ]
    began, seconds = min(reports, default=planted.began), 0.0
    for own in events:
        after = [event for event in own if began < event["at"] <= planted.recovered]
        starts = [number for number, event in enumerate(after) if event["what"] == "started"]
        steps = after[starts[-1] if starts else 0 :]
        first = next((event["at"] for event in steps if event["what"] == "committed"), math.inf)
        seconds = max(seconds, first - began)
    return seconds


def longest_pause(planted: PlantedFault, events: Sequence[Sequence[Event]]) -> float:
    """Return the longest time between two steps of a rank, from a fault to its recovery."""
    pauses = [0.0]
    for own in events:
        steps = [event["at"] for event in own if event["what"] == "committed"]
        pauses += [
            after - before
            for before, after in pairwise(steps)
            if after > planted.began and before < planted.recovered
        ]
    return max(pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """By how much a process grew, from its first quiet readings to its last ones.

    Attributes:
        late_resident_bytes: The part of the growth in the second half of the readings.
    """

    rank: int
    seconds: float
    resident_bytes: float
    late_resident_bytes: float
    descriptors: float
    threads: float


def growths(
    readings: Sequence[Reading],
    faults: Sequence[PlantedFault],
    events: Sequence[Sequence[Event]],
) -> list[Growth]:
    """Return the growth of each process that has enough readings outside of faults.

    Readings of a rank count after its first windows, those of the launcher after those of any rank.
    """
    of_process: dict[tuple[int, int], list[Reading]] = defaultdict(list)
    warm = dict(_warm(events))
    first_warm = min(warm.values(), default=math.inf)
    for reading in readings:
        is_quiet = not any(one.began <= reading.at <= one.recovered for one in faults)
        since = first_warm if reading.rank == LAUNCHER else warm.get(reading.pid, math.inf)
        if is_quiet and reading.at > since:
            of_process[reading.rank, reading.pid].append(reading)
    return [
        Growth(
            rank=rank,
            seconds=own[-1].at - own[0].at,
            resident_bytes=_grown([reading.resident_bytes for reading in own]),
            late_resident_bytes=_grown([one.resident_bytes for one in own[len(own) // 2 :]]),
            descriptors=_grown([reading.descriptors for reading in own]),
            threads=_grown([reading.threads for reading in own]),
        )
        for (rank, _), own in of_process.items()
        if len(own) >= 2 * MEDIAN_OF
    ]


def resident_growth_by_fault(
    readings: Sequence[Reading], faults: Sequence[PlantedFault]
) -> list[dict[int, int]]:
    """Return by how many bytes each rank grew over each fault, in the order of the faults.

    From the last readings before the fault to the last ones before the next fault. A rank that was
    restarted, or that has too few readings, is left out.
    """
    found = []
    for number, fault in enumerate(faults):
        since = faults[number - 1].recovered if number else -math.inf
        until = faults[number + 1].began if number + 1 < len(faults) else math.inf
        before = _by_process(readings, since, fault.began)
        after = _by_process(readings, fault.recovered, until)
        found.append(
            {
                rank: round(_last(after[rank, pid]) - _last(before[rank, pid]))
                for rank, pid in sorted(before.keys() & after.keys())
                if rank != LAUNCHER
            }
        )
    return found


def _by_process(
    readings: Sequence[Reading], since: float, until: float
) -> dict[tuple[int, int], list[int]]:
    """Return the resident bytes of each process that was read often enough in this time."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for reading in readings:
        if since < reading.at < until:
            found[reading.rank, reading.pid].append(reading.resident_bytes)
    return {key: own for key, own in found.items() if len(own) >= MEDIAN_OF}


def _last(values: Sequence[int]) -> float:
    return median(values[-MEDIAN_OF:])


def _grown(values: Sequence[int]) -> float:
    return _last(values) - median(values[:MEDIAN_OF])


def _warm(events: Sequence[Sequence[Event]]) -> Iterator[tuple[int, float]]:
    """Yield each process of a rank, and when it had warmed up."""
    for own in events:
        pid, windows = 0, 0
        for event in own:
            if event["what"] == "started":
                pid, windows = int(event["pid"]), 0
            elif event["what"] == "committed":
                windows += 1
                if windows == WARM_UP_WINDOWS:
                    yield pid, event["at"]


def failed_scrapes(
    scrapes: Sequence[Scrape],
    faults: Sequence[PlantedFault],
    events: Sequence[Sequence[Event]],
) -> list[Scrape]:
    """Return the scrapes without an answer while training went on.

    Stopped and starting ranks cannot answer, nor can ranks before the first step and after the
    last.
    """
    silent = [one for one in faults if one.restarts or one.fault.kind == STOP]
    steps = [event["at"] for own in events for event in own if event["what"] == "committed"]
    return [
        answer
        for answer in scrapes
        if answer.error is not None
        and steps
        and min(steps) < answer.at
        and answer.ended < max(steps)
        and not any(answer.at <= one.recovered and answer.ended >= one.began for one in silent)
    ]
