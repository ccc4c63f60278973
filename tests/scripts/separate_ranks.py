"""Ranks that nobody watches over: where one dies the others live on, unlike under a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.launching import SCRIPTS, environment

TIMEOUT_SECONDS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended; `told` is what it wrote, empty where it did not."""

    returncode: int
    told: dict[str, Any]
    last_words: str


def run_apart(script: str, folder: Path, *, world_size: int, arguments: tuple = ()) -> list[Ended]:
    """Run `script FOLDER ARGUMENTS` on each rank; it writes FOLDER/rank-r.json."""
    command = [sys.executable, str(SCRIPTS / script), str(folder), *map(str, arguments)]
    ranks = [start_rank(command, folder, rank, world_size) for rank in range(world_size)]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [ended(folder, number, rank.returncode) for number, rank in enumerate(ranks)]


def start_rank(
    command: list[str], folder: Path, rank: int, world_size: int
) -> subprocess.Popen[bytes]:
    variables = environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MEETING_FILE=str(folder / "store"),
    )
    with (folder / f"rank-{rank}.out").open("wb") as output:
        return subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )


def meet() -> None:
    """In a rank: join the others."""
    import deepspeed
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"file://{os.environ['MEETING_FILE']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    deepspeed.init_distributed("gloo", verbose=False)


def ended(folder: Path, rank: int, returncode: int) -> Ended:
    file = folder / f"rank-{rank}.json"
    return Ended(
        returncode=returncode,
        told=json.loads(file.read_text()) if file.exists() else {},
        last_words=(folder / f"rank-{rank}.out").read_text(errors="replace")[-3000:],
    )
