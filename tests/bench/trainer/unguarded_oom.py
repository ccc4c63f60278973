"""Runs out of memory on one rank at random places of windows in which the ranks do not vote.

The 100 cases are drawn with a fixed seed: ranks, engine, failing rank, pass, block, micro-batch and
the samples that fit. In every other case an allocation fails under a limit on addresses; in the
others an error is raised. Each result is kept in `.build/unguarded_oom`; `--resume` runs only the
cases that have none.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

SEED, NUM = 18, 100
LONGEST_SECONDS = 20.0
MICRO_BATCHES, BLOCKS = 3, 3
LAST_SAMPLES = 2  # of 8, in micro-batches of 3
# Buckets are small, so that most of a pass lies between two collectives.
ENGINES = (
    "stage 0",
    "stage 1, optimizer on host",
    "stage 2, small buckets",
    "stage 2, small buckets per owner",
    "stage 2, overlapping",
    "stage 2, optimizer on host",
    "stage 3, small buckets",
    "stage 3, eager prefetching",
    "stage 3, overlapping",
    "stage 3, all-reduce",
    "stage 3, bf16",
    "stage 3, all on host",
)
COUNTED = ((2, "stage 2, small buckets"), (3, "stage 3, eager prefetching"))
SCRIPT = SCRIPTS / "trainer" / "unguarded_oom.py"
FOLDER = Path(__file__).parents[3] / ".build" / "unguarded_oom"


@dataclass(frozen=True)
class Case:
    """A window in which one rank runs out of memory.

    Attributes:
        number: In the order in which the cases are drawn.
        world_size: Ranks.
        engine: Name of the engine's options.
        fault: Where memory runs out, as the script reads it.
    """

    number: int
    world_size: int
    engine: str
    fault: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    Attributes:
        case: The case.
        ended: Error with which the run ended; "" if it went on.
        reasons: Reasons for which the failing rank did not issue the rest of its pass; "" if it
            did, and none if no collective of the pass had been issued.
        seconds: Longest time of the window on any rank, with its repetition.
        is_same: Whether weights and losses equal those of a run with the smaller sizes from the
            start; None if the run ended.
    """

    case: Case
    ended: str
    reasons: Sequence[str]
    seconds: float
    is_same: bool | None


def bench(options: Options) -> Iterator[Row]:
    """Yield how the cases ended, and the votes and collectives of windows without a fault."""
    if not options.resume:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = drawn(6 if options.quick else NUM)
    for group, each in groupby(sorted(cases, key=_group), key=_group):
        _run_group(*group, [case for case in each if not _file(case).exists()])
    outcomes = [_outcome(case) for case in cases]
    yield from _rows(outcomes)
    for world_size, engine in COUNTED:
        yield _cost_row(world_size, engine)


def drawn(num: int) -> list[Case]:
    """Return the cases; half of them are real failures of an allocation."""
    draw = random.Random(SEED)
    cases = []
    for number in range(num):
        world_size, micro_batch = draw.choice((2, 3)), draw.randrange(MICRO_BATCHES)
        fault = {
            "place": draw.choice(("forward", "backward")),
            "block": draw.randrange(BLOCKS),
            "micro_batch": micro_batch,
            "fits": draw.randrange(1, LAST_SAMPLES if micro_batch == 2 else MICRO_BATCHES),
            "ranks": "one",
            "is_real": number % 2 == 0,
            "rank": draw.randrange(world_size),
        }
        cases.append(Case(number, world_size, draw.choice(ENGINES), fault))
    return cases


def _group(case: Case) -> tuple[int, str]:
    return case.world_size, case.engine


def _file(case: Case) -> Path:
    return FOLDER / f"case-{case.number}.json"


def _run_group(world_size: int, engine: str, cases: list[Case]) -> None:
    """Run the cases in one engine. If a case ends the run, start the others again without it."""
    while cases:
        plan = [{"engine": engine, "faults": [case.fault for case in cases]}]
        found = {rank: each[0] for rank, each in _run(world_size, plan).items()}
        ended = [
            number
            for number, case in enumerate(cases)
            if any("ended" in window for window in _windows(found, number))
        ]
        for number in ended or range(len(cases)):
            _file(cases[number]).write_text(json.dumps(_result(cases[number], number, found)))
        cases = [case for number, case in enumerate(cases) if ended and number not in ended]


def _windows(found: Mapping[int, dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the results of a case on all ranks that have one."""
    return [rank["windows"][number] for rank in found.values() if number < len(rank["windows"])]


def _result(case: Case, number: int, found: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    failing = found[case.fault["rank"]]["windows"][number]
    ended = failing.get("ended", "")
    return {
        "ended": ended,
        "reasons": failing["reasons"],
        "seconds": max(window["seconds"] for window in _windows(found, number)),
        "is_same": all(rank["same weights"] and rank["same losses"] for rank in found.values())
        if not ended
        else None,
    }


def _run(world_size: int, plan: list[dict[str, Any]]) -> dict[int, Any]:
    """Run a plan; return the results by rank. A rank that its peer has ended has none."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-oom-") as name:
        folder = Path(name)
        finished = start_ranks(world_size, SCRIPT, folder, json.dumps(plan), cwd=folder)
        files = {rank: folder / f"rank-{rank}.json" for rank in range(world_size)}
        found = {
            rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()
        }
        if not found or (finished.returncode == 0 and len(found) < world_size):
            raise RuntimeError(f"a rank has no result: {finished.stderr[-3000:]}")
        return found


def _outcome(case: Case) -> Outcome:
    return Outcome(case, **json.loads(_file(case).read_text()))


def _rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    went_on = [each for each in outcomes if not each.ended]
    refused = Counter(each.reasons[-1] for each in outcomes if each.ended and any(each.reasons))
    num_real = sum(bool(each.case.fault["is_real"]) for each in outcomes)
    num_three = sum(each.case.world_size == 3 for each in outcomes)
    yield Row(
        what=f"{len(outcomes)} cases, {num_real} real, {num_three} with 3 ranks: trained on",
        measured=f"{len(went_on)}, and {refused.total()} refused",
        goal="all",
        met=len(went_on) + refused.total() == len(outcomes),
    )
    for reason, count in refused.most_common():
        yield Row(what=f"refused: {reason}", measured=str(count))
    for stage in range(4):
        here = [each for each in outcomes if each.case.engine.startswith(f"stage {stage}")]
        yield Row(
            what=f"ZeRO {stage}: the failing rank issued the rest of its pass",
            measured=f"{sum('' in each.reasons for each in here)} of {len(here)} cases",
        )
    num_same = sum(bool(each.is_same) for each in went_on)
    yield Row(
        what="weights and losses as with the smaller sizes from the start",
        measured=f"equal bit for bit in {num_same} of {len(went_on)}",
        goal="all",
        met=num_same == len(went_on),
    )
    longest = max(each.seconds for each in outcomes)
    yield Row(
        what="longest window with an error on any rank, with its repetitions",
        measured=f"{longest:.1f} s",
        goal=f"<= {LONGEST_SECONDS:.0f} s",
        met=longest <= LONGEST_SECONDS,
    )


def _cost_row(world_size: int, engine: str) -> Row:
    (found,) = _run(world_size, [{"engine": engine, "costs": True}])[0]
    names = ("collectives", "votes")
    texts = [
        ", ".join(f"{found[arm][name][-1]} {name}" for name in names) for arm in ("with", "without")
    ]
    return Row(
        what=f"{world_size} ranks, {engine}: a window without an error",
        measured=texts[0],
        spread=f"without records: {texts[1]}",
        goal="equal",
        met=found["with"] == found["without"],
    )
