"""Runs one check of `make verify-gpu` in a process of its own, and ends it after its time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The file to which tests/gpu/conftest.py writes a line for each test.
LINES_VARIABLE = "VERIFY_GPU_LINES"
_GRACE_SECONDS = 5.0
_TAIL = 3000  # characters of the output that a result keeps


def run_check(
    command: Sequence[str], *, folder: Path, limit_seconds: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a command that writes a line for each test, and return its result.

    The outcome is "passed", "failed", "skipped", "timed out" or "crashed". Tests that had ended
    before a time limit keep their results. Files of a compiler's lock that an ended process leaves
    are removed, because later jobs would wait for them.

    Args:
        command: A command that runs pytest.
        folder: An empty folder for the output, the lines and compiled extensions.
        limit_seconds: Time after which the process and its children are ended.
        environment: Its environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines, output = folder / "tests.jsonl", folder / "output.txt"
    lines.unlink(missing_ok=True)
    began = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, LINES_VARIABLE: str(lines)},
            start_new_session=True,
        )
        try:
            code: int | None = wait_for(process, limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
            _remove_locks(environment.get("TORCH_EXTENSIONS_DIR"))
    entries = read_lines(lines)
    tests = [entry for entry in entries if "outcome" in entry]
    outcome = _outcome(code, [test["outcome"] for test in tests])
    result: dict[str, Any] = {
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "tests": tests,
    }
    if outcome == "timed out":
        running = [entry["started"] for entry in entries if "started" in entry]
        ended = {test["test"] for test in tests}
        result["reason"] = f"after {limit_seconds:.0f} s in " + (
            ", ".join(name for name in running if name not in ended) or "no test"
        )
    elif outcome == "skipped":
        result["reason"] = "; ".join(sorted({test["message"] for test in tests}))
    if outcome in ("timed out", "crashed", "failed"):
        result["output"] = output.read_text(errors="replace")[-_TAIL:]
    return result


def wait_for(process: subprocess.Popen[bytes], limit_seconds: float) -> int:
    """Return the exit code of a process; raise subprocess.TimeoutExpired after the limit."""
    return process.wait(limit_seconds)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines that a process has written; the last may be incomplete."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _outcome(code: int | None, outcomes: Sequence[str]) -> str:
    if code is None:
        return "timed out"
    if "failed" in outcomes:
        return "failed"
    if code != 0 or not outcomes:
        return "crashed"
    return "passed" if "passed" in outcomes else "skipped"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children: first by SIGTERM, so that they can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _remove_locks(folder: str | None) -> None:
    """Remove the locks of compilations. No process of the check runs any more."""
    for lock in Path(folder).rglob("lock") if folder else ():
        lock.unlink(missing_ok=True)
