"""Reads metrics logs line by line: the values of one rank at one moment after the other.

The reader accepts a run that is active, and files that are damaged: it lists what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .atomic_file import regular_file_status
from .exporters.series_table import Family
from .metrics_line import MetricsHead, MetricsLine, decode

# Maximum number of damaged lines of a file that are listed one by one.
MAX_LISTED = 5
_SEGMENT = re.compile(r"metrics-(?P<rank>\d+)(?:\.(?P<age>\d+))?\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeriesKey:
    """A series of a rank. The labels have no `rank`; they are sorted by name.

    There is one object for each series of a rank, which all its sessions share.
    """

    family: Family
    name: str
    labels: tuple[tuple[str, str], ...]

    def matches(self, name: str, labels: dict[str, str]) -> bool:
        """Whether the series has this name, and these labels among its labels."""
        return self.name == name and labels.items() <= dict(self.labels).items()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSnapshot:
    """All values of a rank at one moment.

    Attributes:
        head: The rank.
        session: Identifies the process that has written the snapshot: when its log began, in Unix
            seconds. All its counters began at 0.
        unix_seconds: The time of the values.
        values: The values by series. The mapping is reused for the next snapshot.
        cost_seconds: CPU time that the snapshot before this one took; None if it is unknown.
    """

    head: MetricsHead
    session: float
    unix_seconds: float
    values: dict[SeriesKey, float]
    cost_seconds: float | None


def log_files(folder: Path) -> dict[int, list[Path]]:
    """Return the segments of each rank's metrics log, the oldest first."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        if match := _SEGMENT.fullmatch(path.name):
            age = int(match["age"] or 0)
            found.setdefault(int(match["rank"]), []).append((-age, path))
    return {rank: [path for _, path in sorted(found[rank])] for rank in sorted(found)}


def read_snapshots(paths: list[Path], problems: list[str]) -> Iterator[MetricsSnapshot]:
    """Yield the snapshots of one rank. At most one line is in memory at a time.

    Args:
        paths: The segments of the rank's log, the oldest first.
        problems: Gets a sentence for each thing that is missing or damaged.
    """
    reader = _LineReader(problems)
    for path in paths:
        yield from reader.read(path, is_last=path == paths[-1])
    reader.report_gaps()


@dataclass(slots=True, kw_only=True)
class _Session:
    """What the lines of one process have listed so far in the present file, and its values."""

    head: MetricsHead
    families: list[Family] = field(default_factory=list)
    keys: list[SeriesKey] = field(default_factory=list)
    values: dict[SeriesKey, float] = field(default_factory=dict)


class _LineReader:
    """Applies lines to the values of a rank."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        # By session: two watches of one process may write to the same file.
        self._sessions: dict[float, _Session] = {}
        self._next: dict[float, int] = {}
        self._known: dict[tuple[str, tuple[tuple[str, str], ...]], SeriesKey] = {}
        self._num_missing = 0
        self._log = ""

    def read(self, path: Path, *, is_last: bool) -> Iterator[MetricsSnapshot]:
        """Yield the snapshots of one segment."""
        self._log = path.name.split(".")[0]
        num_damaged = num_unlisted = num_read = 0
        self._sessions.clear()
        try:
            regular_file_status(path)
            file = path.open("rb")
        except OSError as error:
            self._problems.append(f"{path}: cannot be read: {error.strerror}")
            return
        with file:
            for number, text in enumerate(file, start=1):
                if not text.strip() and text.endswith(b"\n"):
                    continue
                if text.startswith(b" ") and text.strip():  # `mend_last_line`
                    self._problems.append(
                        f"{path}:{number}: a line before this one was only half written; it is lost"
                    )
                try:
                    line = decode(text)
                    if line.head is None and line.session not in self._sessions:
                        num_unlisted += 1
                        continue
                    snapshot = self._apply(line)
                except ValueError as error:
                    num_damaged += 1
                    if is_last and not text.endswith(b"\n"):
                        self._problems.append(
                            f"{path}:{number}: the last line is only half written; the run was "
                            "killed, or is active"
                        )
                    elif num_damaged <= MAX_LISTED:
                        self._problems.append(f"{path}:{number}: {error}; the line is left out")
                    continue
                num_read += 1
                yield snapshot
        if num_damaged > MAX_LISTED:
            self._problems.append(f"{path}: {num_damaged - MAX_LISTED} more lines are damaged")
        if num_unlisted:
            self._problems.append(
                f"{path}: {num_unlisted} lines are left out, because no line before them lists "
                "their series; the file was truncated or damaged"
            )
        if not (num_read or num_damaged or num_unlisted):
            self._problems.append(f"{path}: is empty")

    def report_gaps(self) -> None:
        """Add a problem if lines are missing between those that were read."""
        if self._num_missing:
            self._problems.append(
                f"{self._log}: {self._num_missing} records are missing: older segments were "
                "deleted (run_log.max_segments), or they could not be written"
            )

    def _apply(self, line: MetricsLine) -> MetricsSnapshot:
        """Return the values after a line.

        Raises:
            ValueError: The line refers to series that the file does not list.
        """
        session = self._sessions[line.session] if line.head is None else _Session(head=line.head)
        families = [*session.families, *line.families]
        num_keys = len(session.keys) + len(line.series)
        if any(not 0 <= series.family < len(families) for series in line.series) or any(
            not 0 <= index < num_keys for index in line.values
        ):
            raise ValueError("it refers to a series that no line before it has listed")
        self._sessions[line.session] = session
        session.families = families
        for series in line.series:
            labels = tuple(sorted(series.labels.items()))
            key = SeriesKey(family=families[series.family], name=series.name, labels=labels)
            session.keys.append(self._known.setdefault((series.name, labels), key))
        for index, value in line.values.items():
            if value is None:
                session.values.pop(session.keys[index], None)
            else:
                session.values[session.keys[index]] = value
        self._num_missing += max(0, line.number - self._next.get(line.session, 0))
        self._next[line.session] = line.number + 1
        return MetricsSnapshot(
            head=session.head,
            session=line.session,
            unix_seconds=line.unix_seconds,
            values=session.values,
            cost_seconds=line.cost_seconds,
        )
