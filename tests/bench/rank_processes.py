"""Starts a rank script as local gloo processes and collects what each rank reports.

No torchrun: its store listens on every interface, and its agent wakes up ten times a second on the
cores that are being measured. The ranks meet in a file instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
# Scripts import `bench` from tests/; `scripts`, `fakes`, `servers` and `lab` from tests/support/.
# Inherited paths stay: they may name the checkout whose zerowatch is measured.
PYTHONPATH = os.pathsep.join(
    filter(
        None, [str(BENCH.parent), str(BENCH.parent / "support"), os.environ.get("PYTHONPATH", "")]
    )
)


class RankFailedError(RuntimeError):
    """A rank exited with an error or did not end in time; the text holds its last output."""


def run_ranks(
    script: str,
    arguments: Mapping[str, object],
    *,
    world_size: int,
    timeout_seconds: float,
    launcher: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run `script` on `world_size` ranks and return each rank's report, in rank order.

    Args:
        script: A path below `tests/bench/`; the script gets `arguments` as one JSON argument.
        arguments: What the script should do.
        world_size: Processes to start.
        timeout_seconds: After this the ranks are killed.
        launcher: Command that starts each rank; its last arguments are the rank's own command.
    """
    with tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as name:
        folder = Path(name)
        command = [*launcher, sys.executable, str(BENCH / script), json.dumps(arguments)]
        ranks = [_start(command, folder, rank, world_size) for rank in range(world_size)]
        try:
            _wait(ranks, folder, time.monotonic() + timeout_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads(_report(folder, rank).read_text()) for rank in range(world_size)]


def _start(command: list[str], folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZEROWATCH_")}
    environment = inherited | {
        "PYTHONPATH": PYTHONPATH,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "BENCH_STORE": str(folder / "store"),
        "BENCH_REPORT": str(_report(folder, rank)),
    }
    with _output(folder, rank).open("wb") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Wait until all ranks have ended without an error; stop at the first failure."""
    while any(rank.poll() is None for rank in ranks):
        late = time.monotonic() > deadline
        if late or any(rank.poll() for rank in ranks):
            break
        time.sleep(0.2)
    for number, rank in enumerate(ranks):
        if rank.poll() is None or rank.poll() == 0:
            continue
        tail = _output(folder, number).read_text(errors="replace")[-3000:]
        raise RankFailedError(f"rank {number} exited with {rank.returncode}:\n{tail}")
    if any(rank.poll() is None for rank in ranks):
        tail = _output(folder, 0).read_text(errors="replace")[-3000:]
        raise RankFailedError(f"{ranks[0].args} did not end in time; rank 0 said last:\n{tail}")


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.out"
