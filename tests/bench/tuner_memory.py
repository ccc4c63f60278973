"""Memory that runs short: how often it runs out without a tuner, and with one that may act."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options import Options
from table import Row

sys.path.append(str(Path(__file__).parents[1]))  # the job is the tests' own
from scripts.launching import SCRIPTS, start

KINDS = ("leak", "growing")
VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # glibc unmaps what is larger as soon as it is freed
    "MALLOC_ARENA_MAX": "1",  # else each new thread maps 64 MiB, used or not
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a job left: whether it came to its end, and what it told of each window."""

    lived: bool
    windows: list[dict[str, Any]]

    @property
    def num_errors(self) -> int:
        """Times that memory ran out, survived or not."""
        told = (self.windows[-1].get("ooms") or {}) if self.windows else {}
        return int(sum(each or 0 for each in told.values())) + (not self.lived and not told)

    @property
    def first_alarm(self) -> int | None:
        """The window with which the risk was first above a half."""
        return next((one["window"] for one in self.windows if (one.get("risk") or 0) > 0.5), None)


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each job."""
    for kind in KINDS[:1] if options.quick else KINDS:
        for arm in ("plain", "off", "auto"):
            ended = _run(kind, arm)
            risky = "" if ended.first_alarm is None else f"risk over 0.5 at {ended.first_alarm}; "
            smallest = min((one.get("micro_batch", 16) for one in ended.windows), default=16)
            yield Row(
                what=f"{kind}, {arm}: times that memory ran out",
                measured=str(ended.num_errors),
                spread=f"{len(ended.windows)} windows, {'done' if ended.lived else 'dead'}; "
                f"{risky}micro-batches down to {smallest}",
                goal="0" if arm == "auto" else "",
                met=ended.lived and ended.num_errors == 0 if arm == "auto" else None,
            )


def _run(kind: str, arm: str) -> Ended:
    with tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as name:
        folder = Path(name)
        script = SCRIPTS / "tuner_memory.py"
        finished = start(sys.executable, script, kind, arm, cwd=folder, variables=VARIABLES)
        lines = (folder / "windows.jsonl").read_text().splitlines()
        windows = [json.loads(line) for line in lines]
        return Ended(lived=finished.returncode == 0, windows=windows)
