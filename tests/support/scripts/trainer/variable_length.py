"""A small language model on batches whose length has a long tail, and the jobs that train it.

A batch's length is Pareto-distributed: most are short, about one in a hundred is as long as can be,
and attention takes memory by the square. Each rank draws its own.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.launching import SCRIPTS, TORCHRUN, environment

RANKS = 2
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "131072",  # glibc unmaps what is larger as soon as it is freed
    "MALLOC_ARENA_MAX": "1",  # else each new thread maps 64 MiB, used or not
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of two ranks.

    Attributes:
        mode: "plain" is a DeepSpeed loop under the limit; "owned" a TrainingRun under the limit,
            then two without it: one not split, one split as the first was.
        windows: How many global batches.
        room_bytes: What each rank may map beyond what it has when the first windows are over.
        stage: Of ZeRO.
    """

    mode: str
    windows: int
    room_bytes: int
    stage: int = 2

    def run(self, folder: Path, timeout_seconds: float) -> JobResult:
        """Train; each rank writes a line after each window, so that an error loses none."""
        arguments = json.dumps(
            {
                "mode": self.mode,
                "windows": self.windows,
                "room_bytes": self.room_bytes,
                "stage": self.stage,
                "folder": str(folder),
            }
        )
        script = SCRIPTS / "trainer" / "variable_length_job.py"
        done = subprocess.run(
            [TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS), str(script), arguments],
            cwd=folder,
            env=environment(**ALLOCATOR),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        ranks = [folder / f"{self.mode}-{rank}.jsonl" for rank in range(RANKS)]
        return JobResult(
            code=done.returncode,
            output=done.stderr,
            windows=[
                [json.loads(line) for line in file.read_text().splitlines()] for file in ranks
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Outcome of a job.

    Attributes:
        code: Its exit code.
        output: Its stderr.
        windows: By rank, a line for each window that was committed.
    """

    code: int
    output: str
    windows: list[list[dict]]

    def of(self, arm: str) -> list[list[dict]]:
        """Return by rank the windows of one of the runs in the job."""
        return [[one for one in rank if one["arm"] == arm] for rank in self.windows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A limited run compared with unlimited ones.

    Attributes:
        windows: Committed by the limited run.
        replayed: Windows of it that had to be run again.
        cut: Windows of it that ended in more micro-batches than one.
        lost, repeated: Samples of the whole sequence, over all ranks.
        worst_ratio: Largest difference of a loss to that of the uncut run, relative.
        same_plan_is_bitwise: Whether losses equal those of the run that was cut alike.
    """

    windows: int
    replayed: int
    cut: int
    lost: int
    repeated: int
    worst_ratio: float
    same_plan_is_bitwise: bool


def compare(ended: JobResult, windows: int, samples: int) -> Comparison:
    """Compare the runs of an "owned" job.

    Args:
        ended: The job.
        windows: How many there should be.
        samples: Of a rank in each window.
    """
    limited, uncut, alike = (ended.of(arm)[0] for arm in ("limited", "uncut", "alike"))
    ids = [one for rank in ended.of("limited") for window in rank for one in window["ids"]]
    ratios = [
        abs(one["loss"] - other["loss"]) / abs(other["loss"])
        for one, other in zip(limited, uncut, strict=True)
    ]
    return Comparison(
        windows=len(limited),
        replayed=sum(window["replays"] > 0 for window in limited),
        cut=sum(len(window["micro_batches"]) > 1 for window in limited),
        lost=len(set(range(windows * samples * RANKS)) - set(ids)),
        repeated=len(ids) - len(set(ids)),
        worst_ratio=max(ratios),
        same_plan_is_bitwise=[one["loss"] for one in limited] == [one["loss"] for one in alike],
    )
