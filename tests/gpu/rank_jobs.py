"""Runs code and jobs of `tests/gpu/jobs/` in processes of their own, on one GPU or on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers.free_port import free_port

JOBS = Path(__file__).parent / "jobs"
_TESTS = Path(__file__).parents[1]
_TAIL = 4000  # characters of standard error in a message
# Only ends a process that hangs: the time limit of the check is shorter.
TIMEOUT_SECONDS = 500.0
# After a rank has failed, the others may still end by themselves.
GRACE_SECONDS = 20.0


def rank_variables(kind: str = "cuda", rank: int = 0, world_size: int = 1) -> dict[str, str]:
    """Return the environment of a rank, with a port that is free now.

    Args:
        kind: DeepSpeed's accelerator, "cuda" or "cpu".
        rank: Of this process, which uses the GPU of the same number.
        world_size: Number of ranks. Ranks of one job must be given one MASTER_PORT.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("ZEROWATCH_")}
    paths = [str(_TESTS), str(_TESTS / "support"), own.get("PYTHONPATH", "")]
    return own | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DS_ACCELERATOR": kind,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONFAULTHANDLER": "1",  # where a rank stood that a signal ended
        "ZEROWATCH_SERVE_PORT": "0",
    }


def run_code(code: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run code on one GPU, and return what it wrote by `out(key=value, ...)`.

    Raises:
        AssertionError: The code has failed; the message has the end of its standard error.
    """
    writes = "import json\ndef out(**found): print('out:', json.dumps(found))\n"
    done = subprocess.run(
        [sys.executable, "-c", writes + code, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=rank_variables() | variables,
    )
    assert done.returncode == 0, done.stderr[-_TAIL:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("out: "):
            found |= json.loads(line.removeprefix("out: "))
    return found


# Variables with which torch records all calls. It has renamed the first of them.
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "100000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100000"}


def run_job(
    name: str,
    folder: Path,
    *arguments: str,
    kind: str = "cuda",
    world_size: int = 1,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run `jobs/NAME FOLDER ARGUMENTS` on each rank, and return the FOLDER/rank-r.json of each.

    Raises:
        AssertionError: A rank has failed; the message has the end of the ranks' standard error.
    """
    common = {"MASTER_PORT": str(free_port()), **(variables or {})}
    files = [(folder / f"stderr-{rank}.txt").open("w+") for rank in range(world_size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOBS / name), str(folder), *arguments],
            cwd=folder,
            stdout=file,
            stderr=file,
            env=rank_variables(kind, rank, world_size) | common,
        )
        for rank, file in enumerate(files)
    ]
    try:
        codes = _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read()[-_TAIL:])
            file.close()
    assert codes == [0] * world_size, "\n".join([f"exit codes: {codes}", *texts])
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit codes. A rank without its peer may wait for ever, and has the code None."""
    ends = time.monotonic() + TIMEOUT_SECONDS
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < ends:
        if any(codes):
            ends = min(ends, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    return codes
