"""Counts the instructions and cache misses that monitoring adds to the training thread.

The steps are the short ones of `training_thread`, on two ranks, each under valgrind's callgrind. It
counts what the thread executes outside of the kernel, and simulates caches that all threads of a
rank share. So the counts do not depend on the speed and hardly on the load of the machine.

The files of callgrind stay in `.build/callgrind`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bench_options import Options
from bench.rank_processes import run_ranks
from bench.result_table import Row

FOLDER = Path(__file__).parents[3] / ".build" / "callgrind"
# Python adapts its bytecode within some steps after wrappers have come or gone.
STEPS, CALLS, SETTLING_STEPS = 20, 100, 60
LARGEST = 10
# A second-level cache of 512 KiB is simulated as the last level. Torch's Flight Recorder is small,
# so that it is full from the first steps on, as in a long training, and no longer grows.
CALLGRIND = [
    *["env", "PYTHONHASHSEED=0", "TORCH_FR_BUFFER_SIZE=64"],
    *["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"],
    *["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=524288,8,64"],
    f"--callgrind-out-file={FOLDER}/rank-%q{{RANK}}",
]
_REQUESTS = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *arm) { CALLGRIND_DUMP_STATS_AT(arm); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_FUNCTION = re.compile(r"c?fn=\((?P<number>\d+)\)(?: (?P<name>.*))?")
_RECURSION = re.compile(r"'\d+$")
_COUNTS = re.compile(r"[-+*\d]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What callgrind counted each time an arm ran.

    Attributes:
        events: By kind: `Ir` are instructions. `ILmr`, `DLmr` and `DLmw` are misses of the last
            cache by instructions, reads and writes.
        instructions: By function.
    """

    events: Mapping[str, float]
    instructions: Mapping[str, float]

    def total(self, kinds: Sequence[str]) -> float:
        return sum(self.events[kind] for kind in kinds)


def bench(options: Options) -> Iterator[Row]:
    """Yield what monitoring adds for each rank, and the functions that it is in."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    library = FOLDER / "requests.so"
    if (reason := _compile(library)) is not None:
        yield Row(what="instructions of the training thread", measured=f"not counted: {reason}")
        return
    asked: dict[str, Any] = {
        "library": str(library),
        "steps": 2 if options.quick else STEPS,
        "calls": 2 if options.quick else CALLS,
        "settling_steps": 2 if options.quick else SETTLING_STEPS,
    }
    ranks = run_ranks(
        "monitoring_cost/training_thread_instructions_job.py",
        asked,
        world_size=2,
        timeout_seconds=7200,
        launcher=CALLGRIND,
    )
    yield Row(
        what="in none of the counted steps",
        measured="the kernel, collections of garbage, forced releases of the GIL",
        spread="readings of memory and coverage: only where they are named",
    )
    for rank, found in enumerate(ranks):
        profiles = {
            arm: read_profile(FOLDER / f"rank-{rank}.{part}-01", times)
            for part, (arm, times) in enumerate(found["arms"], start=1)
        }
        yield from _rank_rows(f"rank {rank}", profiles, asked["steps"])
    shown = FOLDER / "rank-0.2-01"
    yield Row(what="profile of rank 0, monitored", measured=f"callgrind_annotate {shown}")


def _compile(library: Path) -> str | None:
    """Compile the requests to callgrind; return why nothing can be counted, None if it can."""
    for program in ("valgrind", "gcc"):
        if shutil.which(program) is None:
            return f"{program} not found: apt-get install {program}"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    done = subprocess.run(command, input=_REQUESTS, capture_output=True, text=True)
    if done.returncode:
        return f"gcc needs valgrind/callgrind.h of the package valgrind: {done.stderr.strip()}"
    return None


def read_profile(path: Path, times: int) -> Profile:
    """Read a file that callgrind wrote for one thread, and divide its counts.

    The format is in valgrind's manual. The levels of a recursion count for one function.

    Args:
        path: The file.
        times: How often the arm ran.
    """
    kinds: list[str] = []
    names: dict[str, str] = {}
    function, is_of_callee = "", False
    events: Counter[str] = Counter()
    instructions: Counter[str] = Counter()
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("events: "):
            kinds = line.split()[1:]
        elif line.startswith("calls="):
            is_of_callee = True  # the next line repeats what the callee's own lines have
        elif named := _FUNCTION.fullmatch(line):
            if named["name"]:  # only once for each number
                names[named["number"]] = _RECURSION.sub("", named["name"])
            if line.startswith("fn"):
                function = names[named["number"]]
        elif _COUNTS.match(line):
            if not is_of_callee:
                # A line leaves out the zeros at its end.
                counts = dict(zip(kinds, map(int, line.split()[1:]), strict=False))
                events.update(counts)
                instructions[function] += counts.get("Ir", 0)
            is_of_callee = False
    return Profile(
        events={kind: events[kind] / times for kind in kinds},
        instructions={name: count / times for name, count in instructions.items()},
    )


def _rank_rows(whose: str, found: Mapping[str, Profile], num_steps: int) -> Iterator[Row]:
    off, watched, off_again, watched_again = (
        found[arm] for arm in ("off", "watched", "off again", "watched again")
    )
    kinds = {
        "instructions": ["Ir"],
        "L2 misses of instructions": ["ILmr"],
        "L2 misses of data": ["DLmr", "DLmw"],
    }
    for what, events in kinds.items():
        yield Row(
            what=f"{whose}: {what} per step, unmonitored",
            measured=f"{off.total(events):,.0f}",
            spread=f"{num_steps} steps",
        )
        same = off_again.total(events) - off.total(events)
        same_watched = watched_again.total(events) - watched.total(events)
        both = off.total(events) + off_again.total(events)
        added = (watched.total(events) + watched_again.total(events) - both) / 2
        yield Row(
            what=f"{whose}: {what} added per step",
            measured=f"{added:,.0f}",
            spread=f"A/A: unmonitored {same:+,.0f}, monitored {same_watched:+,.0f}",
        )
    read, unread, plain = (
        found[arm].total(["Ir"]) for arm in ("read", "watched again", "off again")
    )
    yield Row(
        what=f"{whose}: instructions added, step with a reading of memory and coverage",
        measured=f"{read - plain:,.0f}",
        spread=f"the reading {read - unread:,.0f}",
    )
    call, plain_call = (found[f"calls, {arm}"].total(["Ir"]) for arm in ("watched", "off"))
    yield Row(
        what=f"{whose}: instructions added per call of all_reduce",
        measured=f"{call - plain_call:,.0f}",
        spread=f"unmonitored {plain_call:,.0f}",
    )
    added_by = Counter(watched.instructions)
    added_by.subtract(off.instructions)
    for name in sorted(added_by, key=lambda name: -abs(added_by[name]))[:LARGEST]:
        yield Row(
            what=f"{whose}: of the instructions added, {name.partition('(')[0][:60]}",
            measured=f"{added_by[name]:+,.0f}",
        )
