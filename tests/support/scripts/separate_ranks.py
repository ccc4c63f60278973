"""Starts ranks without a launcher: if one dies, the others continue."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.forked_ranks import fork_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How a rank ended; `report` is the JSON that it wrote, empty if it wrote none."""

    returncode: int
    report: dict[str, Any]
    output_tail: str


def run_apart(
    script: str, folder: Path, *, world_size: int, arguments: tuple = ()
) -> list[RankResult]:
    """Run `script FOLDER ARGUMENTS` on each rank; it writes FOLDER/rank-r.json."""
    ranks = fork_ranks(
        world_size,
        SCRIPTS / script,
        folder,
        *arguments,
        cwd=folder,
        variables={"MEETING_FILE": str(folder / "store")},
        grace_seconds=TIMEOUT_SECONDS,
    )
    return [ended(folder, number, rank) for number, rank in enumerate(ranks)]


def outputs(ranks: Sequence[RankResult]) -> str:
    """Return the exit code of each rank, and the end of what it has printed."""
    return "\n".join(
        f"--- rank {number}, exit code {rank.returncode}:\n{rank.output_tail}"
        for number, rank in enumerate(ranks)
    )


def meet() -> None:
    """Join the process group; called by a rank."""
    import deepspeed
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"file://{os.environ['MEETING_FILE']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    deepspeed.init_distributed("gloo", verbose=False)


def ended(folder: Path, number: int, rank: Finished) -> RankResult:
    file = folder / f"rank-{number}.json"
    return RankResult(
        returncode=rank.returncode,
        report=json.loads(file.read_text()) if file.exists() else {},
        output_tail=(rank.stdout + rank.stderr)[-3000:],
    )
