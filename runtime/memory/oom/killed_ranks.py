"""Finds, at the next start, the ranks of this host that ended without a word, and tells of each.

Several ranks may look at the same time: each finding goes to the one that moves the life file away.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from ...common.report_files import create_first_free
from .exit_cause import ExitCause, ExitFinding, classify_exit
from .killed_report import headline, report_text
from .last_records import LastRecord, last_records, latest
from .liveness_file import ROOT, SUFFIX, ProcessMarker, boot_id, count_kills_in, is_over, read_life

logger = logging.getLogger(__name__)

# Whoever keeps more runs than this has started many since; looking takes 0.1 ms a run.
MAX_RUNS = 100
TOLD_SUFFIX = ".life.json"
# Ranks of one launch start within this time of each other.
LAUNCH_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRank:
    """A rank that ended without a word.

    Attributes:
        folder: Its run folder.
        life: The process.
        finding: What ended it.
        records: Its last records, the latest last.
        report: Where that is told at length; None where the folder cannot be written.
    """

    folder: Path
    life: ProcessMarker
    finding: ExitFinding
    records: tuple[LastRecord, ...]
    report: Path | None

    @property
    def by_oom_killer(self) -> bool:
        """Whether the kernel's OOM killer did it, for certain or probably."""
        return self.finding.verdict in (ExitCause.OOM_KILLER, ExitCause.PROBABLY)


def detect_killed_ranks(runs: Path, host: str, *, root: Path = ROOT) -> list[KilledRank]:
    """Find, report and log those that have not been told of yet.

    To be called before this process writes a life file of its own, off the training thread: it
    reads and writes files. Never raises for a disk's sake.

    Args:
        runs: The folder in which each run has a folder of its own.
        host: This machine's name; ranks of others are left to those.
        root: The root of the file system, for tests.
    """
    found = []
    for folder in _newest(runs):
        dead = [(path, life) for path, life in _lives(folder) if _has_ended(path, life, host, root)]
        together = {life for _, life in dead}.union(_told(folder))
        for path, life in dead:
            told = _tell(folder, path, life, together, root)
            if told is not None:
                found.append(told)
    return found


def _newest(runs: Path) -> list[Path]:
    try:
        folders = [entry for entry in os.scandir(runs) if entry.is_dir()]
        folders.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [Path(entry.path) for entry in folders[:MAX_RUNS]]


def _lives(folder: Path) -> Iterator[tuple[Path, ProcessMarker]]:
    for path in sorted(folder.glob(f"rank-*{SUFFIX}")):
        life = read_life(path)
        if life is not None:
            yield path, life


def _told(folder: Path) -> list[ProcessMarker]:
    """Return those that another rank has just told of, or that were told of long ago."""
    lives = map(read_life, (folder / "oom").glob(f"rank-*{TOLD_SUFFIX}"))
    return [life for life in lives if life is not None]


def _has_ended(path: Path, life: ProcessMarker, host: str, root: Path) -> bool:
    try:
        return life.host == host and is_over(life, path, root)
    except OSError:  # another rank has moved it, or the kernel does not tell
        return False


def _tell(
    folder: Path, path: Path, life: ProcessMarker, together: Set[ProcessMarker], root: Path
) -> KilledRank | None:
    """Take the life file away, judge, write and log; None if another rank was faster."""
    records = last_records(folder, life.rank, life.started_at_unix_seconds)
    try:
        (folder / "oom").mkdir(exist_ok=True)
        path.rename(folder / "oom" / f"rank-{life.rank}-{life.pid}-{life.start_ticks}{TOLD_SUFFIX}")
        same_boot = life.boot_id == boot_id(root)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.info("%s cannot be moved, so it is told of again: %s", path, error)
        return None
    finding = classify_exit(
        life,
        same_boot=same_boot,
        now=count_kills_in(life.kills.cgroup_file, root),
        died_together=sum(_of_one_launch(life, other) for other in together),
        limit_ratio=latest(records, "limit_ratio"),
        risk_ratio=latest(records, "risk_ratio"),
    )
    report = _write(folder / "oom", life.rank, report_text(life, finding, records))
    # The rule is an end by a signal, and launchers send them: that is no news.
    level = logging.INFO if finding.verdict is ExitCause.OTHERWISE else logging.WARNING
    where = f"report: {report}" if report else "no report could be written"
    logger.log(level, "run %s: %s (%s)", folder.name, headline(life, finding, records), where)
    return KilledRank(
        folder=folder, life=life, finding=finding, records=tuple(records), report=report
    )


def _of_one_launch(life: ProcessMarker, other: ProcessMarker) -> bool:
    apart = abs(life.started_at_unix_seconds - other.started_at_unix_seconds)
    same = (life.boot_id, life.kills.cgroup_inode) == (other.boot_id, other.kills.cgroup_inode)
    return same and apart < LAUNCH_SECONDS


def _write(folder: Path, rank: int, text: str) -> Path | None:
    endings = chain([""], (f"-{number}" for number in count(2)))
    try:
        created = create_first_free(
            folder / f"rank-{rank}-killed{ending}.txt" for ending in endings
        )
        if created is None:
            return None
        path, descriptor = created
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError:
        return None
    return path
