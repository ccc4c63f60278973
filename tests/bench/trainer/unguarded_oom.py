"""Runs out of memory on one rank at drawn places of windows in which the ranks do not vote.

The 100 cases are drawn with a fixed seed: ranks, engine, failing rank, window, pass, micro-batch,
and the number of an allocation or collective within the pass. In most cases the allocator fails,
under a limit on addresses that stays low until all ranks have left the window; in the others an
error is raised. Each case is a job of its own. Each result is kept in `.build/unguarded_oom`;
`--resume` runs only the cases that have none.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from scripts.forked_ranks import RunningRanks, running_ranks, start_ranks
from scripts.launching import SCRIPTS

SEED, NUM, MAX_RANKS = 1818, 100, 3
LONGEST_SECONDS = 20.0
REAL_OF_TEN = 6
# Of a hundred cases. The guide lists the reasons; the draw does not avoid them.
MOST_REFUSED = 40
# For a case to end: far above what it takes, so that a rank that waits is seen as one.
JOB_SECONDS = 240.0
ENGINES = (
    "stage 0",
    "stage 1",
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
WINDOWS = (4, 5)  # one of each shape; the guard is disarmed by then
PASSES = ("equal",) * 8 + ("alternating", "new")
LANES = 3  # cases that run at the same time: most of their time, ranks wait for each other
COUNTED = ((2, "stage 2, small buckets"), (3, "stage 3, eager prefetching"))
SCRIPT = SCRIPTS / "trainer" / "drawn_oom.py"
COST_SCRIPT = SCRIPTS / "trainer" / "unguarded_oom.py"
FOLDER = Path(__file__).parents[3] / ".build" / "unguarded_oom"
# Allocations of this size are mapped: they fail at the limit, and are unmapped when they are freed.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "16384"}


@dataclass(frozen=True)
class Drawn:
    """A window in which one rank runs out of memory.

    Attributes:
        number: In the order in which the cases are drawn.
        world_size: Ranks.
        case: Where memory runs out, as the script reads it.
    """

    number: int
    world_size: int
    case: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of a case.

    Attributes:
        drawn: The case.
        ended: Error with which the failing rank's run ended; "" if it went on.
        reasons: Reasons for which the failing rank did not issue the rest of its pass; "" if it
            did, and none if no collective of the pass had been issued.
        codes: Exit codes of the ranks, by rank.
        is_killed: Whether a rank waited until the bench killed it.
        struck_in: Place of the failure; "" if memory did not run out.
        was_guarded: Whether the ranks voted within the passes of the window.
        seconds: From the shortage until the last rank began the window again, or until its script
            had the error or its process had ended.
        is_same: Whether weights and losses of all ranks equal those of a run with the smaller sizes
            from the start; None if the run ended.
        output: End of the output of a case that did not end well.
    """

    drawn: Drawn
    ended: str
    reasons: Sequence[str]
    codes: Sequence[int | None]
    is_killed: bool
    struck_in: str
    was_guarded: bool
    seconds: float
    is_same: bool | None
    output: str

    @property
    def is_refused(self) -> bool:
        """Whether the run ended clearly on all ranks: each raised or logged an error.

        gloo ends a process by a signal where passes vary for the first time; see the guide.
        """
        is_new = self.drawn.case["passes"] == "new"
        has_errors = all(code and (code > 0 or is_new) for code in self.codes)
        return bool(self.struck_in) and has_errors and not self.is_killed

    @property
    def went_on(self) -> bool:
        return not self.ended and not any(self.codes) and not self.is_killed

    @property
    def why(self) -> str:
        """Reason for which the run ended, for a refused case."""
        if any(code is not None and code < 0 for code in self.codes):
            return "gloo ended a process, because two collectives of different sizes met"
        reason = next(filter(None, self.reasons), "")
        if not reason and "" in self.reasons:
            return "the freed memory does not suffice for the other collectives"
        return reason or f"other: {self.ended[:100]}"


def bench(options: Options) -> Iterator[Row]:
    """Yield how the cases ended, and the votes and collectives of windows without a fault."""
    if not options.resume:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = drawn(6 if options.quick else NUM)
    _run_cases([each for each in cases if not _file(each).exists()])
    outcomes = [Outcome(each, **json.loads(_file(each).read_text())) for each in cases]
    write_cases(outcomes, FOLDER / "cases.md")
    yield from _rows(outcomes)
    for world_size, engine in COUNTED:
        yield _cost_row(world_size, engine)


def drawn(num: int, seed: int = SEED) -> list[Drawn]:
    """Return the cases, in the order in which they run."""
    draw = random.Random(seed)
    return [_drawn(number, draw) for number in range(num)]


def _drawn(number: int, draw: random.Random) -> Drawn:
    world_size, engine = draw.randint(2, MAX_RANKS), draw.choice(ENGINES)
    place = draw.choice(("forward", "backward"))
    # Passes of other kinds have no collectives before the update.
    has_collectives = engine[:7] == "stage 3" or (engine[:7] == "stage 2" and place == "backward")
    by = draw.choice(("allocation", "collective")) if has_collectives else "allocation"
    case = {
        "engine": engine,
        "rank": draw.randrange(world_size),
        "window": draw.choice(WINDOWS),
        "place": place,
        "micro_batch": draw.choice(("first", "middle", "last")),
        "by": by,
        "moment": draw.choice(("before", "within", "after")) if by == "collective" else "after",
        "at": round(draw.random(), 3),
        "is_real": number % 10 < REAL_OF_TEN,
        "passes": draw.choice(PASSES),
    }
    return Drawn(number, world_size, case)


def _file(each: Drawn) -> Path:
    return FOLDER / f"case-{each.number}.json"


def _run_cases(cases: Sequence[Drawn]) -> None:
    """Run cases in their order, in lanes that have rank servers of their own."""
    waiting: SimpleQueue[Drawn | None] = SimpleQueue()
    for each in (*cases, *(None,) * LANES):
        waiting.put(each)

    def run_lane(first_server: int) -> None:
        while (each := waiting.get()) is not None:
            _file(each).write_text(json.dumps(run_case(each, first_server)))

    with ThreadPoolExecutor(LANES) as lanes:
        for done in [lanes.submit(run_lane, MAX_RANKS * lane) for lane in range(LANES)]:
            done.result()


def run_case(each: Drawn, first_server: int = 0) -> dict[str, Any]:
    """Run a case as a job of its own."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-oom-") as name:
        folder = Path(name)
        command = (SCRIPT, folder, json.dumps(each.case))
        options: dict[str, Any] = {"variables": VARIABLES, "first_server": first_server}
        with running_ranks(each.world_size, *command, cwd=folder, **options) as ranks:
            ended_at = _ended_at(ranks, each.world_size)
            is_killed = None in ended_at
            ranks.kill()
            finished = ranks.join()
        files = [folder / f"rank-{rank}.json" for rank in range(each.world_size)]
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    failing = found[each.case["rank"]]
    struck_at = failing.get("struck at")
    # A rank that its peers have ended has no time of its own.
    left_at = [
        rank.get("left at") or ended or time.monotonic()
        for rank, ended in zip(found, ended_at, strict=True)
    ]
    is_compared = all("same weights" in rank for rank in found)
    return {
        "ended": next((rank["ended"] for rank in (failing, *found) if "ended" in rank), ""),
        "reasons": failing.get("reasons", []),
        "codes": [rank.returncode for rank in finished],
        "is_killed": is_killed,
        "struck_in": "" if struck_at is None else failing["struck in"],
        "was_guarded": bool(failing.get("was guarded")),
        "seconds": 0.0 if struck_at is None else max(left_at) - struck_at,
        "is_same": all(rank["same weights"] and rank["same losses"] for rank in found)
        if is_compared
        else None,
        "output": "" if is_compared else "\n".join(rank.stderr[-1500:] for rank in finished),
    }


def _ended_at(ranks: RunningRanks, num: int) -> list[float | None]:
    """Wait for the ranks; return when each has ended, None for those that run for too long."""
    deadline = time.monotonic() + JOB_SECONDS
    times: list[float | None] = [None] * num
    while None in times and (left := deadline - time.monotonic()) > 0:
        for rank, code in enumerate(ranks.codes(left)):
            if code is not None:
                times[rank] = times[rank] or time.monotonic()
    return times


def _run_costs(world_size: int, engine: str) -> dict[str, Any]:
    """Count what windows without a fault issue on rank 0."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-oom-") as name:
        folder, plan = Path(name), [{"engine": engine, "costs": True}]
        finished = start_ranks(world_size, COST_SCRIPT, folder, json.dumps(plan), cwd=folder)
        if finished.returncode:
            raise RuntimeError(f"a rank has no result: {finished.stderr[-3000:]}")
        found: list[dict[str, Any]] = json.loads((folder / "rank-0.json").read_text())
        return found[0]


def _rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    went_on = [each for each in outcomes if each.went_on and each.struck_in]
    refused = [each for each in outcomes if each.is_refused]
    yield _all_row(outcomes, went_on, refused)
    yield _refused_row(refused, len(outcomes))
    for reason, count in Counter(each.why for each in refused).most_common():
        yield Row(what=f"refused: {reason}", measured=str(count))
    for stage in range(4):
        here = [e for e in outcomes if e.drawn.case["engine"].startswith(f"stage {stage}")]
        num_issued = sum("" in each.reasons and each.went_on for each in here)
        yield Row(
            what=f"ZeRO {stage}: trained on",
            measured=f"{sum(each.went_on for each in here)} of {len(here)}",
            spread=f"{num_issued} issued the rest of their pass",
        )
    num_same = sum(bool(each.is_same) for each in went_on)
    yield Row(
        what="weights and losses of a case as with its smaller sizes from the start",
        measured=f"equal bit for bit in {num_same} of {len(went_on)}",
        goal="all",
        met=num_same == len(went_on),
    )
    for what, cases in (("trained on", went_on), ("was refused", refused)):
        longest = max((each.seconds for each in cases), default=0.0)
        yield Row(
            what=f"longest time until all ranks had left the window, where the run {what}",
            measured=f"{longest:.1f} s",
            goal=f"<= {LONGEST_SECONDS:.0f} s",
            met=longest <= LONGEST_SECONDS,
        )
    num_guarded = sum(each.was_guarded for each in outcomes)
    yield Row(
        what="cases in which the ranks voted within the passes",
        measured=str(num_guarded),
        goal="0",
        met=num_guarded == 0,
    )


def _all_row(
    outcomes: Sequence[Outcome], went_on: Sequence[Outcome], refused: Sequence[Outcome]
) -> Row:
    struck = [each for each in outcomes if each.struck_in]
    num_real = sum(bool(each.drawn.case["is_real"]) for each in struck)
    num_three = sum(each.drawn.world_size == 3 for each in struck)
    return Row(
        what=f"{len(outcomes)} cases, {len(struck)} ran out of memory, {num_real} of the "
        f"allocator, {num_three} with 3 ranks: trained on, or refused",
        measured=f"{len(went_on)} and {len(refused)}",
        goal="all",
        met=len(went_on) + len(refused) == len(outcomes) == len(struck),
    )


def _refused_row(refused: Sequence[Outcome], num: int) -> Row:
    num_other = sum(each.why.startswith("other") for each in refused)
    return Row(
        what="refused; without a reason that the guide lists",
        measured=f"{len(refused)}; {num_other}",
        goal=f"<= {MOST_REFUSED}; 0",
        met=len(refused) * NUM <= MOST_REFUSED * num and num_other == 0,
    )


def write_cases(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write one line for each case."""
    lines = ["| case | ranks | engine | failure | place | result | weights | seconds |"]
    lines.append("|" + "---|" * 8)
    for each in outcomes:
        case = each.drawn.case
        place = f"{case['place']}, {case['micro_batch']}, window {case['window']}"
        passes = "" if case["passes"] == "equal" else f", {case['passes']} passes"
        result = "trained on" if each.went_on else f"refused: {each.why}"
        if not each.went_on and not each.is_refused:
            result = f"FAILED: {each.codes} {each.why}"
        cells = (
            each.drawn.number,
            each.drawn.world_size,
            case["engine"] + passes,
            "allocator" if case["is_real"] else "raised",
            f"{place}: {each.struck_in or 'none'}",
            result,
            {True: "equal", False: "DIFFER", None: ""}[each.is_same],
            f"{each.seconds:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    path.write_text("\n".join(lines) + "\n")


def _cost_row(world_size: int, engine: str) -> Row:
    found = _run_costs(world_size, engine)
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
