"""Reads the metrics log of a run: the last values of all series, and their values over time.

The reader accepts a run that is active, and files that are damaged: it lists what is missing.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...metrics.atomic_file import regular_file_status
from ...metrics.exporters.series_table import Family
from ...metrics.metrics_line import MetricsHead, MetricsLine, decode

# Default maximum number of snapshots that are kept for each rank. A longer run is kept at a lower
# resolution.
MAX_SNAPSHOTS = 2000
# Maximum number of problems of a kind that are listed one by one.
MAX_LISTED = 5
_SEGMENT = re.compile(r"metrics-(?P<rank>\d+)(?:\.(?P<age>\d+))?\.jsonl")

Floats = npt.NDArray[np.float64]


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
        head: The rank, and the session that has written the snapshot.
        unix_seconds: The time of the values.
        values: The values by series. The mapping is reused for the next snapshot.
        cost_seconds: Time that the snapshot before this one took; None if it is unknown.
    """

    head: MetricsHead
    unix_seconds: float
    values: dict[SeriesKey, float]
    cost_seconds: float | None


@dataclass(slots=True, kw_only=True)
class RankMetrics:
    """The metrics of one rank.

    Examples:
        >>> rank = read_metrics(Path("runs/last")).ranks[0]
        >>> rank.total(COMM_EXPOSED_SECONDS.name, group="dp")
        12.5
        >>> seconds, values = rank.over_time(LOSS.name)

    Attributes:
        heads: The sessions of the rank, in order. A restart begins another one.
        last: The last values, by series. Series that had ended are left out.
        last_by_session: The same at the end of each session.
        unix_seconds: The times of the snapshots that were kept.
        cost_seconds: The time that each snapshot took to read, encode and write, as far as known.
        columns: The values over time, by series. NaN where a series had no value.
    """

    heads: list[MetricsHead] = field(default_factory=list)
    last: dict[SeriesKey, float] = field(default_factory=dict)
    last_by_session: list[dict[SeriesKey, float]] = field(default_factory=list)
    unix_seconds: Floats = field(default_factory=lambda: np.empty(0))
    cost_seconds: Floats = field(default_factory=lambda: np.empty(0))
    columns: dict[SeriesKey, Floats] = field(default_factory=dict)

    def series(self, name: str, **labels: str) -> list[SeriesKey]:
        """Return the series of this name and with these labels that any session has had."""
        known = dict.fromkeys(key for last in self.last_by_session for key in last)
        known.update(dict.fromkeys(self.columns))
        return [key for key in known if key.matches(name, labels)]

    def value(self, name: str, **labels: str) -> float | None:
        """Return the last value of the one series of this name and with these labels.

        None if no series or several series match.
        """
        found = [value for key, value in self.last.items() if key.matches(name, labels)]
        return found[0] if len(found) == 1 else None

    def values(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the last values of all series of this name and with these labels, by labels."""
        return {k.labels: value for k, value in self.last.items() if k.matches(name, labels)}

    def total(self, name: str, **labels: str) -> float | None:
        """Return the increase of a counter over all sessions, summed over the matching series.

        Counters begin at 0 in each session. None if no series matches.
        """
        found = [
            value
            for last in self.last_by_session
            for key, value in last.items()
            if key.matches(name, labels)
        ]
        return sum(found) if found else None

    def over_time(self, name: str, **labels: str) -> tuple[Floats, Floats]:
        """Return Unix seconds and values, summed over the matching series.

        The value is NaN where no matching series had one. A counter drops to 0 with a new session.
        Both arrays are empty if no series matches, or if `read_metrics` did not keep it.
        """
        found = [column for key, column in self.columns.items() if key.matches(name, labels)]
        if not found:
            return np.empty(0), np.empty(0)
        stacked = np.stack(found)
        total = np.nansum(stacked, axis=0)
        total[np.isnan(stacked).all(axis=0)] = np.nan
        return self.unix_seconds, total


@dataclass(slots=True, kw_only=True)
class RecordedMetrics:
    """The metrics logs of a run.

    Attributes:
        ranks: The ranks that have a log.
        problems: What is missing or damaged, and where. Empty if all is well.
    """

    ranks: dict[int, RankMetrics] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_metrics(
    folder: Path,
    names: frozenset[str] | None = None,
    *,
    max_snapshots: int = MAX_SNAPSHOTS,
) -> RecordedMetrics:
    """Read the metrics logs of all ranks of a run.

    Args:
        folder: The run folder.
        names: The names whose values over time are kept, as in the catalog; None for all
            names, and an empty set for the last values only.
        max_snapshots: Maximum number of snapshots kept for each rank, evenly spread, and the last.

    Returns:
        The metrics. A run without metrics logs has no ranks, and a problem says so.
    """
    found = RecordedMetrics()
    for rank, paths in log_files(folder).items():
        history = _History(names, max_snapshots)
        for snapshot in read_snapshots(paths, found.problems):
            history.add(snapshot)
        if history.metrics.heads:
            found.ranks[rank] = history.finish()
    if not found.ranks and not found.problems:
        found.problems.append(
            f"{folder} has no metrics log (metrics-<rank>.jsonl): "
            "run_log.metrics_interval_seconds was 0, or an older zerowatch has written the run"
        )
    return found


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


class _LineReader:
    """Applies lines to the values of a rank."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._head: MetricsHead | None = None
        self._families: list[Family] = []
        self._keys: list[SeriesKey] = []
        self._known: dict[tuple[str, tuple[tuple[str, str], ...]], SeriesKey] = {}
        self._values: dict[SeriesKey, float] = {}
        self._next = 0
        self._num_missing = 0
        self._rank = ""

    def read(self, path: Path, *, is_last: bool) -> Iterator[MetricsSnapshot]:
        """Yield the snapshots of one segment."""
        self._rank = path.name.split(".")[0]
        num_damaged = num_without_head = 0
        self._families, self._keys, head_of_file = [], [], None
        try:
            regular_file_status(path)
            file = path.open("rb")
        except OSError as error:
            self._problems.append(f"{path}: cannot be read: {error.strerror}")
            return
        with file:
            for number, text in enumerate(file, start=1):
                try:
                    if not text.strip():
                        continue
                    line = decode(text)
                    if line.head is None and head_of_file is None:
                        num_without_head += 1
                        continue
                    head_of_file = line.head or head_of_file
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
                yield snapshot
        if num_damaged > MAX_LISTED:
            self._problems.append(f"{path}: {num_damaged - MAX_LISTED} more lines are damaged")
        if num_without_head:
            self._problems.append(
                f"{path}: {num_without_head} lines at the beginning have no list of series before "
                "them, and are left out; the file was truncated"
            )
        if head_of_file is None and not num_damaged and not num_without_head:
            self._problems.append(f"{path}: is empty")

    def report_gaps(self) -> None:
        """Add a problem if lines are missing between those that were read."""
        if self._num_missing:
            self._problems.append(
                f"{self._rank}: {self._num_missing} records are missing: older segments were "
                "deleted (run_log.max_segments), or they could not be written"
            )

    def _apply(self, line: MetricsLine) -> MetricsSnapshot:
        """Return the values after a line.

        Raises:
            ValueError: The line refers to series that the file does not list.
        """
        head = line.head
        families = [*([] if head else self._families), *line.families]
        num_keys = (0 if head else len(self._keys)) + len(line.series)
        if any(not 0 <= series.family < len(families) for series in line.series) or any(
            not 0 <= index < num_keys for index in line.values
        ):
            raise ValueError("it refers to a series that no line before it has listed")
        if head is not None:
            if self._head is None or head.session != self._head.session:
                self._next = 0
            self._head, self._keys, self._values = head, [], {}
        assert self._head is not None
        self._families = families
        for series in line.series:
            labels = tuple(sorted(series.labels.items()))
            key = SeriesKey(family=families[series.family], name=series.name, labels=labels)
            self._keys.append(self._known.setdefault((series.name, labels), key))
        for index, value in line.values.items():
            if value is None:
                self._values.pop(self._keys[index], None)
            else:
                self._values[self._keys[index]] = value
        self._num_missing += max(0, line.number - self._next)
        self._next = line.number + 1
        return MetricsSnapshot(
            head=self._head,
            unix_seconds=line.unix_seconds,
            values=self._values,
            cost_seconds=line.cost_seconds,
        )


class _History:
    """Keeps the values of a rank over time, in bounded memory."""

    def __init__(self, names: frozenset[str] | None, max_snapshots: int) -> None:
        self.metrics = RankMetrics()
        self._names, self._max_snapshots = names, max(2, max_snapshots)
        self._rows: list[tuple[float, array[float]]] = []
        self._columns: dict[SeriesKey, int | None] = {}  # None: not kept
        self._num_columns = 0
        self._costs = array("d")
        self._num_seen, self._stride = 0, 1
        self._latest_seconds = 0.0

    def add(self, snapshot: MetricsSnapshot) -> None:
        """Take over the values: those over time only of every `stride`-th snapshot."""
        metrics = self.metrics
        if not metrics.heads or metrics.heads[-1].session != snapshot.head.session:
            metrics.heads.append(snapshot.head)
            metrics.last_by_session.append({})
        metrics.last = metrics.last_by_session[-1] = snapshot.values
        self._latest_seconds = snapshot.unix_seconds
        if snapshot.cost_seconds is not None:
            self._costs.append(snapshot.cost_seconds)
        if self._num_seen % self._stride == 0:
            self._rows.append(self._row())
            if len(self._rows) > self._max_snapshots:
                del self._rows[1::2]
                self._stride *= 2
        self._num_seen += 1

    def finish(self) -> RankMetrics:
        """Return the metrics. Not to be called twice."""
        if self._rows and (self._num_seen - 1) % self._stride:
            self._rows.append(self._row())
        table = np.full((len(self._rows), self._num_columns), np.nan)
        for i, (_, row) in enumerate(self._rows):
            table[i, : len(row)] = row
        self.metrics.unix_seconds = np.array([seconds for seconds, _ in self._rows])
        self.metrics.cost_seconds = np.array(self._costs)
        self.metrics.columns = {
            key: table[:, column] for key, column in self._columns.items() if column is not None
        }
        return self.metrics

    def _row(self) -> tuple[float, array[float]]:
        """Return the time and the values of the latest snapshot."""
        row = array("d", [math.nan]) * self._num_columns
        for key, value in self.metrics.last.items():
            column = self._columns.get(key, -1)
            if column == -1:
                is_kept = self._names is None or key.name in self._names
                column = self._columns[key] = self._num_columns if is_kept else None
                if is_kept:
                    self._num_columns += 1
                    row.append(math.nan)
            if column is not None:
                row[column] = value
        return self._latest_seconds, row
