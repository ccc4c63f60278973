"""Trains for half an hour while faults happen, and compares with an undisturbed run.

make bench ARGS="chaos"                 30 minutes, a fault every 3
make bench ARGS="chaos --minutes 120"   2 hours
make bench ARGS="--quick chaos"         4 minutes, as many faults as in 30
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.bench_options import Options
from bench.chaos import planned_faults as planned
from bench.chaos.chaos_run import (
    ChaosRun,
    EventReader,
    RunFailedError,
    chaos_run,
    missing,
    processes_of,
    train_undisturbed,
)
from bench.chaos.fake_clock import LEFT_BY_LIBRARY
from bench.chaos.job_checks import (
    Course,
    Growth,
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
from bench.chaos.observations import LAUNCHER, RANKS, Event, PlantedFault, Scrape
from bench.result_table import Row

QUICK_MINUTES = 4.0
PATIENCE_SECONDS = 400.0
# The launcher's: those that faults need, and some that must not be needed.
SPARE_RESTARTS = 5
GROWTH_MIB = 32.0  # what counts as a leak for the memory forecast too
MOST_SHOWN = 3
# The launcher's folder of logs, torch's cache, and Python's folder of a rank that was killed.
LEFT_BY_OTHERS = "torchelastic_|torchinductor_|pymp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the disturbed run did, and what it left behind.

    Attributes:
        failure: Why the run ended too early; empty if it did not.
        code: The launcher's exit code; None after a failure.
        growth_by_fault: Bytes by which each rank grew over each planted fault, by rank.
        left: Names of what is left: processes, files and locks.
        last_logged: By rank the last step in the run log.
        nan: The rank with a NaN, by the position of the batch.
    """

    failure: str
    code: int | None
    planted: Sequence[PlantedFault]
    events: Sequence[Sequence[Event]]
    growths: Sequence[Growth]
    growth_by_fault: Sequence[dict[int, int]]
    scrapes: Sequence[Scrape]
    wrong_figures: Sequence[str]
    left: dict[str, list[str]]
    last_logged: dict[int, int]
    nan: dict[str, int]


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each fault, and one for each thing that faults must not change."""
    if (reason := missing()) is not None:
        yield Row(what="chaos", measured=f"not run: {reason}")
        return
    minutes = QUICK_MINUTES if options.quick else options.minutes
    faults = planned.draw(planned.SEED, minutes)
    with tempfile.TemporaryDirectory(prefix="zerowatch-chaos-") as name:
        outcome = disturb(Path(name, "disturbed"), faults, minutes)
        yield from _fault_rows(outcome, faults)
        yield from _course_rows(outcome, Path(name, "undisturbed"), minutes)
    yield from _leak_rows(outcome)
    yield from _figure_rows(outcome)


def disturb(folder: Path, faults: Sequence[planned.Fault], minutes: float) -> Outcome:
    """Train while faults happen."""
    folder.mkdir()
    planted: list[PlantedFault] = []
    failure, code = "", None
    restarts = sum(map(planned.may_restart, faults)) + SPARE_RESTARTS
    with chaos_run(folder, max_restarts=restarts, patience_seconds=PATIENCE_SECONDS) as run:
        try:
            run.wait_for_first_step()
            for fault in faults:
                run.sleep_until(fault.at_seconds)
                planted.append(run.plant(fault))
                print(_line(planted[-1], run), flush=True)
            run.sleep_until(60.0 * minutes)
            code = run.end()
        except RunFailedError as error:
            failure = str(error)
            print(failure, flush=True)
        # Before the processes that are left are killed, and the disk is unmounted.
        left, last_logged = _left(run), _last_logged(run)
    nan = folder / "nan.json"
    return Outcome(
        failure=failure,
        code=code,
        planted=planted,
        events=run.log.events,
        growths=growths(run.readings, planted, run.log.events),
        growth_by_fault=resident_growth_by_fault(run.readings, planted),
        scrapes=run.scrapes,
        wrong_figures=run.figures.wrong,
        left=left,
        last_logged=last_logged,
        nan=json.loads(nan.read_text()) if nan.exists() else {},
    )


def _line(planted: PlantedFault, run: ChaosRun) -> str:
    begin = planted.began - run.began
    seconds = planted.recovered - planted.ended
    return (
        f"{begin:.0f} s: {planted.fault.name}; {planted.restarts} restarts, all train "
        f"{seconds:.1f} s after its end"
    )


def _fault_rows(outcome: Outcome, faults: Sequence[planned.Fault]) -> Iterator[Row]:
    for planted, growth in zip(outcome.planted, outcome.growth_by_fault, strict=True):
        fault = planted.fault
        seconds = next_step_seconds(planted, outcome.events)
        grown = ", ".join(f"rank {rank} {size / 2**20:+.1f} MiB" for rank, size in growth.items())
        yield Row(
            what=f"{fault.at_seconds / 60:.1f} min: {fault.name}",
            measured=f"next step after {seconds:.1f} s",
            spread=f"lasts {fault.lasts_seconds:.0f} s; longest pause "
            f"{longest_pause(planted, outcome.events):.1f} s; {planted.restarts} restarts"
            + (f"; RSS {grown}" if grown else ""),
            goal="training goes on",
            met=True,
        )
    for fault in faults[len(outcome.planted) :]:
        yield Row(
            what=f"{fault.at_seconds / 60:.1f} min: {fault.name}",
            measured="training did not go on, or the fault was not reached",
            goal="training goes on",
            met=False,
        )
    kinds = {planted.fault.kind for planted in outcome.planted}
    yield Row(
        what="kinds of faults",
        measured=f"{len(kinds)} of {len(planned.LASTS)}",
        spread=f"{len(outcome.planted)} faults, seed {planned.SEED}",
        goal="each",
        met=kinds == set(planned.LASTS),
    )
    used = Counter({one.fault.kind: 0 for one in outcome.planted})
    for one in outcome.planted:
        used[one.fault.kind] += one.restarts
    attempts = max((event["attempt"] for own in outcome.events for event in own), default=0)
    most = sum(planned.may_restart(one.fault) for one in outcome.planted)
    yield Row(
        what="restarts used",
        measured=f"{attempts}",
        spread=", ".join(f"{kind}: {number}" for kind, number in used.items() if number),
        goal=f"<= {most}",
        met=attempts <= most,
    )
    yield Row(
        what="end of the run",
        measured=f"exit code {outcome.code}" if outcome.code is not None else "failed",
        spread=outcome.failure.partition("\n")[0],
        goal="exit code 0",
        met=outcome.code == 0,
    )


def _course_rows(outcome: Outcome, folder: Path, minutes: float) -> Iterator[Row]:
    """Yield what was trained on, and whether an undisturbed run computes the same."""
    if outcome.code is None:
        yield Row(what="samples and losses", measured="not compared: the run failed")
        return
    courses = [Course.of(own) for own in outcome.events]
    resumed = next(event for event in outcome.events[0] if event["what"] == "resumed")
    num_samples, batch_samples = resumed["samples"], resumed["batch_samples"]
    wrong = wrong_samples(courses, num_samples, batch_samples)
    num_batches = len(courses[0].by_position())
    yield Row(
        what=f"samples of {num_batches * batch_samples / num_samples:.1f} epochs of {num_samples}",
        measured=_shown(wrong) or "each once an epoch",
        spread=f"{len(courses[0].skipped)} batches skipped because of NaN",
        goal="each once an epoch",
        met=not wrong,
    )
    folder.mkdir()
    plan = plan_of(courses, outcome.nan)
    try:
        train_undisturbed(folder, plan, timeout_seconds=240.0 * minutes + PATIENCE_SECONDS)
    except RunFailedError as error:
        yield Row(what="losses", measured=str(error), goal="as undisturbed", met=False)
        return
    reader = EventReader(folder)
    events = reader.update()
    wrong = wrong_losses(courses, [Course.of(own) for own in events])
    done = sum(event["what"] == "committed" for event in outcome.events[0])
    replays = sum(event["replays"] for event in courses[0].committed.values())
    yield Row(
        what=f"losses of {courses[0].last_step} steps",
        measured=_shown(wrong) or "equal bit for bit",
        spread=f"{done - courses[0].last_step} steps trained again, {replays} replays, "
        f"{len(plan['micro_batch_samples']) - 1} changes of micro-batches, which the undisturbed "
        "run makes too",
        goal="as undisturbed",
        met=not wrong,
    )
    ends = [[one for one in own if one["what"] == "ended"] for own in (*outcome.events, *events)]
    found = {(one["weights"], one["samples"]) for end in ends for one in end}
    yield Row(
        what="weights in the end, and the count of samples",
        measured="equal bit for bit" if len(found) == 1 else "differ",
        goal="as undisturbed",
        met=len(found) == 1 and all(len(end) == 1 for end in ends),
    )
    yield _save_row(outcome)


def _save_row(outcome: Outcome) -> Row:
    """Return the row of refused saves."""
    own = outcome.events[0]
    full = [one for one in outcome.planted if one.fault.kind == planned.FULL_DISK]
    written = [event for event in own if event["what"] == "saved"]
    refused = [event for event in own if event["what"] == "not_saved"]
    others = [str(event["error"]) for event in refused_without_reason(own, full)]
    return Row(
        what="saves",
        measured=f"{len(written)} begun, {len(refused)} refused",
        spread=f"{sum(event['in_background'] for event in written)} in the background"
        + (f"; {_shown(others)}" if others else ""),
        goal="refused only while the disk is full",
        met=not others,
    )


def _leak_rows(outcome: Outcome) -> Iterator[Row]:
    """Yield by how much processes grew, and what the run left behind."""
    for name, ranks in (("rank", RANKS), ("launcher", (LAUNCHER,))):
        own = [growth for growth in outcome.growths if growth.rank in ranks]
        if not own:
            yield Row(what=f"{name}: growth", measured="too few quiet readings")
            continue
        longest = max(growth.seconds for growth in own)
        spread = f"{len(own)} processes, read over {longest:.0f} s at most"
        mib = max(growth.resident_bytes for growth in own) / 2**20
        late_mib = max(growth.late_resident_bytes for growth in own) / 2**20
        yield Row(
            what=f"{name}: RSS growth",
            measured=f"{mib:+.1f} MiB at most",
            spread=f"{late_mib:+.1f} MiB at most in the second half; {spread}",
            goal=f"<= {GROWTH_MIB:g} MiB",
            met=mib <= GROWTH_MIB,
        )
        for kind in ("descriptors", "threads"):
            most = max(getattr(growth, kind) for growth in own)
            yield Row(
                what=f"{name}: {kind}",
                measured=f"{most:+.0f} at most",
                spread=spread,
                goal="<= 0",
                met=most <= 0,
            )
    for kind, names in outcome.left.items():
        yield Row(
            what=f"left at the end: {kind}",
            measured=f"{len(names)}",
            spread=_shown(names),
            goal="0",
            met=not names,
        )


def _figure_rows(outcome: Outcome) -> Iterator[Row]:
    answered = [scrape.seconds for scrape in outcome.scrapes if scrape.error is None]
    failed = failed_scrapes(outcome.scrapes, outcome.planted, outcome.events)
    slowest = max(answered, default=math.inf)
    times = f"median {1000 * median(answered or [math.inf]):.0f} ms, slowest {slowest:.1f} s"
    yield Row(
        what="scrapes of /metrics without an answer",
        measured=f"{len(failed)}, {len(answered)} with one" if answered else "no answer",
        spread=_shown([str(scrape.error) for scrape in failed]) or times,
        goal="0, except of stopped and starting ranks",
        met=bool(answered) and not failed,
    )
    wrong = outcome.wrong_figures
    yield Row(
        what="figures of /metrics",
        measured=_shown(wrong) or "no NaN, no counter fell within a process",
        goal="no NaN, no counter falls",
        met=bool(answered) and not wrong,
    )
    last = max((Course.of(own).last_step for own in outcome.events), default=0)
    yield Row(
        what="last step in the run log",
        measured=", ".join(f"rank {rank}: {step}" for rank, step in outcome.last_logged.items()),
        goal=f"{last}",
        met=len(outcome.last_logged) == len(RANKS) and set(outcome.last_logged.values()) == {last},
    )


def _left(run: ChaosRun) -> dict[str, list[str]]:
    """Return what the run has left on its host, by kind."""
    deadline = time.monotonic() + 10.0  # workers of a DataLoader end a moment after their rank
    while (pids := processes_of(run.host)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return {
        "processes": [f"{pid} {_command(pid)}" for pid in pids],
        "files in /dev/shm": _names(run.folder / "shm", LEFT_BY_LIBRARY),
        "temporary files": _names(run.folder / "temporary", LEFT_BY_OTHERS),
        "marks of live processes": [each.name for each in run.disk.rglob("*.alive.json")],
        "locked files": [each.name for each in run.disk.rglob("*") if _is_locked(each)],
        "unfinished checkpoints": [
            each.name for each in (run.disk / "saves").glob("*") if "partial" in each.name
        ],
    }


def _names(folder: Path, not_ours: str) -> list[str]:
    """Return the names in a folder, without those that match a regular expression."""
    return [path.name for path in folder.iterdir() if not re.match(not_ours, path.name)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80]
    except OSError:
        return "has ended"


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file, of either kind."""
    if not path.is_file():
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _last_logged(run: ChaosRun) -> dict[int, int]:
    """Return by rank the last step in the run log."""
    found = {}
    for rank in RANKS:
        for log in run.disk.glob(f"runs/*/rank-{rank}.jsonl"):
            lines = [line for line in log.read_text().splitlines() if line]
            found[rank] = int(json.loads(lines[-1])["step"]) if lines else 0
    return found


def _shown(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    rest = len(names) - MOST_SHOWN
    return "; ".join(names[:MOST_SHOWN]) + (f"; {rest} more" if rest > 0 else "")
