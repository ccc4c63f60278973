"""Reads the metrics log of a run: the last values of all series, and their values over time.

The reader accepts a run that is active, and files that are damaged: it lists what is missing.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...metrics.metrics_line import MetricsHead
from ...metrics.metrics_log_reader import (
    MetricsSnapshot,
    SeriesKey,
    log_files,
    read_snapshots,
)

# Default maximum number of snapshots that are kept for each rank. A longer run is kept at a lower
# resolution.
MAX_SNAPSHOTS = 2000

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class RankMetrics:
    """The metrics of one rank.

    Examples:
        >>> rank = read_metrics(Path("runs/last")).ranks[0]
        >>> rank.total(COMM_EXPOSED_SECONDS.name, group="dp")
        12.5
        >>> seconds, values = rank.over_time(LOSS.name)

    Attributes:
        heads: The rank in each of its processes, in order. A restart begins another one.
        last: The last values, by series. Series that had ended are left out.
        last_by_session: The same at the end of each process.
        unix_seconds: The times of the snapshots that were kept.
        cost_seconds: CPU time that each snapshot took to read, encode and write, as far as known.
        columns: The values over time, by series. NaN where a series had no value.
    """

    heads: list[MetricsHead] = field(default_factory=list)
    last: dict[SeriesKey, float] = field(default_factory=dict)
    last_by_session: list[dict[SeriesKey, float]] = field(default_factory=list)
    unix_seconds: Floats = field(default_factory=lambda: np.empty(0))
    cost_seconds: Floats = field(default_factory=lambda: np.empty(0))
    columns: dict[SeriesKey, Floats] = field(default_factory=dict)

    def series(self, name: str, **labels: str) -> list[SeriesKey]:
        """Return the series of this name and with these labels that any process has had."""
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
        """Return the increase of a counter over all processes, summed over the matching series.

        Counters begin at 0 in each process. None if no series matches.
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

        The value is NaN where no matching series had one. A counter drops to 0 with a new process.
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
        self._session_indices: dict[float, int] = {}
        self._latest_seconds = 0.0

    def add(self, snapshot: MetricsSnapshot) -> None:
        """Take over the values: those over time only of every `stride`-th snapshot."""
        metrics = self.metrics
        index = self._session_indices.setdefault(snapshot.session, len(metrics.heads))
        if index == len(metrics.heads):
            metrics.heads.append(snapshot.head)
            metrics.last_by_session.append({})
        metrics.last = metrics.last_by_session[index] = snapshot.values
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
