"""Starts `tuner_memory.py`, and reads its report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.launching import SCRIPTS, start

VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # glibc unmaps what is larger as soon as it is freed
    "MALLOC_ARENA_MAX": "1",  # else each new thread maps 64 MiB, used or not
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Outcome of a job: its exit code, the end of its output, and a line for each window."""

    code: int
    stderr_tail: str
    windows: list[dict[str, Any]]

    @property
    def out_of_memory(self) -> float:
        """Errors of any kind."""
        return sum(each or 0 for each in self.windows[-1]["ooms"].values())


def run(folder: Path, kind: str, arm: str) -> JobResult:
    folder.mkdir()
    script = SCRIPTS / "tuner" / "tuner_memory.py"
    finished = start(sys.executable, script, kind, arm, cwd=folder, variables=VARIABLES)
    lines = (folder / "windows.jsonl").read_text().splitlines()
    windows = [json.loads(line) for line in lines]
    return JobResult(code=finished.returncode, stderr_tail=finished.stderr[-3000:], windows=windows)
