"""Kills processes and fills disks in each part of a save, and loads what is left.

One process saves a small engine of three files, while training waits and in the background. Then
random ranks of a job of two ranks are killed, which saves DeepSpeed's engine after each window.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from scripts.launching import SCRIPTS
from scripts.trainer.full_disk import (
    FullDiskOutcome,
    in_background,
    small_disk,
    waited_for,
    without_bytes,
    without_files,
)
from scripts.trainer.run_restart_job import RestartResult, train

MODES = {"waited for": ((), waited_for), "in background": (("background",), in_background)}
RANK_KILLS, STEPS, SEED = 20, 60, 11
SECONDS_A_KILL = 180.0

RESERVE, CREATE = "the folder is reserved", "its folder is created"
RUN, WEIGHTS = "the state of the run is written", "the weights are written"
OPTIMIZER = "the optimizer is written"
CHECK, MANIFEST = "files are synced and checked", "the manifest is written"
RENAME, LATEST, PRUNE = (
    "it is made complete by a rename",
    "`latest` is written",
    "the oldest is deleted",
)
PARTS = (RESERVE, CREATE, RUN, WEIGHTS, OPTIMIZER, CHECK, MANIFEST, RENAME, LATEST, PRUNE)
# First operation of the parts in which Python reports operations, in order.
FIRST_OPERATIONS = (
    (CREATE, r"os\.mkdir /\.partial"),
    (CHECK, r"open /\.partial-\S+\.pt$"),
    (MANIFEST, r"open /\.partial\S+\.zerowatch\.json"),
    (RENAME, r"os\.rename /\.partial-step-\d+$"),
    (LATEST, r"open /\.latest"),
    (PRUNE, r"open /step-"),
)
# A file's name in what a process was doing when it was killed, or in the error of a full disk.
FILES = ((RUN, "zerowatch-rank"), (WEIGHTS, "model.pt"), (OPTIMIZER, "optimizer.pt"))
ERRORS = (*FILES, (MANIFEST, "zerowatch.json"), (LATEST, "latest"), (CREATE, ".partial"))


def bench(options: Options) -> Iterator[Row]:
    """Yield what is lost by a kill or a full disk in each part of a save."""
    for mode, (arguments, save) in MODES.items():
        yield from _rows(f"{mode}: killed while", _killed(arguments))
        with tempfile.TemporaryDirectory(prefix="zerowatch-disk-") as name:
            disk = Path(name)
            with small_disk(disk):
                yield from _rows(
                    f"{mode}: disk is full while", map(_disk_case, without_bytes(disk, save))
                )
                yield from _rows(
                    f"{mode}: no file can be created while",
                    map(_disk_case, without_files(disk, save)),
                )
    kills, steps = (2, 12) if options.quick else (RANK_KILLS, STEPS)
    through = _train(steps, 0)
    for mode, (arguments, _) in MODES.items():
        yield _row_of_ranks(mode, through, _train(steps, kills, is_background=bool(arguments)))


# Part of a case, the checkpoint that was loaded, and whether nothing was lost.
Case = tuple[str, str, bool]


def _rows(what: str, cases: Iterable[Case]) -> Iterator[Row]:
    by_part: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_part[case[0]].append(case)
    for part in sorted(by_part, key=[*PARTS, ""].index):
        found = by_part[part]
        loaded = [case[1] for case in found]
        yield Row(
            what=f"{what} {part or '(there is enough room)'}",
            measured=f"{sum(not case[2] for case in found)} of {len(found)} lose a checkpoint",
            spread=", ".join(
                f"{loaded.count(one)} load the {one} one"
                for one in ("previous", "new")
                if one in loaded
            ),
            goal="0",
            met=all(case[2] for case in found),
        )


def _killed(arguments: Sequence[str]) -> Iterator[Case]:
    with tempfile.TemporaryDirectory(prefix="zerowatch-kills-") as name:
        script = SCRIPTS / "trainer" / "resume_killed.py"
        environment = os.environ | {"DS_ACCELERATOR": "cpu"}
        command = [sys.executable, str(script), name, *arguments]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        kills = json.loads(Path(name, "found.json").read_text())
    part, later = RESERVE, list(FIRST_OPERATIONS)
    for kill in kills:
        killed_at = kill["killed_at"]
        if later and re.match(later[0][1], killed_at.replace("write", "open")):
            part = later.pop(0)[0]
        of_file = [
            each for each, file in FILES if killed_at.startswith("write") and file in killed_at
        ]
        if not of_file and "owner" in killed_at:
            of_file = [RESERVE]
        yield (of_file[0] if of_file else part), *_kill_outcome(kill)


def _kill_outcome(kill: dict[str, Any]) -> tuple[str, bool]:
    (first, *others), weight = kill["steps"], kill["weight"]
    is_intact = {first, weight, *others} in ({2}, {3}) and len(kill["after"]) == 4
    return ("new" if first == 3 else "previous"), is_intact


def _disk_case(outcome: FullDiskOutcome) -> Case:
    parts = [part for part, name in ERRORS if name in (outcome.error or "")]
    loaded = "new" if outcome.loaded[0] == 2 else "previous"
    return (parts[0] if parts else ""), loaded, outcome.is_intact


def _train(steps: int, kills: int, *, is_background: bool = False) -> RestartResult:
    with tempfile.TemporaryDirectory(prefix="zerowatch-restart-") as name:
        return train(
            Path(name),
            steps=steps,
            save_every=1,
            kills=kills,
            seed=SEED,
            timeout_seconds=SECONDS_A_KILL * (kills + 2),
            launched=False,
            ZEROWATCH_CHECKPOINT_BACKGROUND=str(is_background).lower(),
        )


def _row_of_ranks(mode: str, through: RestartResult, killed: RestartResult) -> Row:
    is_same = killed.code == 0 and all(
        killed.committed(rank) == through.committed(rank)
        and killed.of(rank, "ended")[0]["weights"] == through.of(rank, "ended")[0]["weights"]
        for rank in (0, 1)
    )
    repeated = len(killed.of(0, "committed")) - len(through.of(0, "committed"))
    return Row(
        what=f"{mode}: two ranks that save after each window, {len(killed.kills)} random kills",
        measured=f"samples, losses and weights {'are equal' if is_same else 'DIFFER'}",
        spread=f"{repeated} windows repeated",
        goal="equal",
        met=is_same,
    )
