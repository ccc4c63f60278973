"""Writes the metrics logs of a run as OpenMetrics text with timestamps.

The text is what `promtool tsdb create-blocks-from openmetrics` reads. Each series has the labels
that Prometheus adds to the series of a target, so dashboards and rules work on it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TextIO

from ..metrics_line import MetricsHead
from ..metrics_log_reader import SeriesKey, log_files, read_snapshots
from .series_table import Family

# Prometheus records for each target whether it answered a scrape. Each line of a log is an answer.
UP = Family(
    name="up", kind="gauge", help="Whether the rank was alive: 1 at each record of its log."
)
# The labels of the values of one observation of a histogram or of a summary.
_PART_LABELS = ("le", "quantile")
# Endings of sample names that are not part of the name of the family.
_ENDINGS = {"counter": "_total", "info": "_info"}


@dataclass(slots=True, kw_only=True)
class ExportedRun:
    """What an export has written.

    Attributes:
        run_id: The run; empty if there are no metrics.
        first_seconds: Unix seconds of the first sample; infinite if there are none.
        last_seconds: Unix seconds of the last sample.
        interval_seconds: Time between two records, the longest of all ranks.
        num_samples: Number of samples.
        series: The name and the labels of each series.
        problems: What is missing or damaged in the logs, and what was left out.
    """

    run_id: str = ""
    first_seconds: float = math.inf
    last_seconds: float = -math.inf
    interval_seconds: float = 0.0
    num_samples: int = 0
    series: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Column:
    """The values of one series of one process. Only changes are kept, to save memory."""

    __slots__ = ("_last", "_numbers", "_values")

    def __init__(self) -> None:
        self._numbers = array("q")  # of the records at which the value changes; ~n if it ends
        self._values = array("d")
        self._last: float | None = None

    def append(self, number: int, value: float | None) -> None:
        """Add the value of a record; None if the series has ended."""
        if value != self._last:
            self._numbers.append(~number if value is None else number)
            self._values.append(math.nan if value is None else value)
            self._last = value

    def over(self, num_records: int) -> Iterator[float | None]:
        """Yield the value at each record; None where the series had none."""
        value, begin = None, 0
        for number, changed in zip(self._numbers, self._values, strict=True):
            end = ~number if number < 0 else number
            for _ in range(begin, end):
                yield value
            value, begin = None if number < 0 else changed, end
        for _ in range(begin, num_records):
            yield value


@dataclass(slots=True, kw_only=True)
class _Process:
    """The metrics log of one process of a rank."""

    target: dict[str, str]
    seconds: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[SeriesKey, _Column] = field(default_factory=dict)

    def add(self, unix_seconds: float, values: dict[SeriesKey, float]) -> None:
        """Add a record."""
        number = len(self.seconds)
        self.seconds.append(unix_seconds)
        for key, value in values.items():
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = _Column()
            column.append(number, value)
        for key in self.columns.keys() - values.keys():
            self.columns[key].append(number, None)

    def labels(self, key: SeriesKey) -> dict[str, str]:
        """Return the labels of a series; those of the target count, as with Prometheus."""
        return dict(sorted({**dict(key.labels), **self.target}.items()))


@dataclass(slots=True, kw_only=True)
class _Member:
    """A series: the beginning of its lines, and what each process has written of it."""

    head: str
    columns: list[tuple[_Process, _Column | None]] = field(default_factory=list)  # None: always 1

    def samples(self) -> Iterator[tuple[int, float]]:
        """Yield time in milliseconds and value of each sample."""
        for process, column in self.columns:
            num_records = len(process.seconds)
            values = repeat(1.0, num_records) if column is None else column.over(num_records)
            for seconds, value in zip(process.seconds, values, strict=True):
                if value is not None:
                    yield round(seconds * 1000), value


def write_openmetrics(
    folder: Path, out: TextIO, *, job: str, ranks: Collection[int] = ()
) -> ExportedRun:
    """Write the metrics logs of a run as OpenMetrics text.

    The changes of all values are in memory at once: about 12 bytes each.

    Args:
        folder: The run folder.
        out: The file to write to.
        job: The value of the label `job`, the name of the scrape job in Prometheus.
        ranks: The ranks to write; all ranks if empty.

    Returns:
        What was written. If the run has no metrics logs, nothing is written but the end.

    Raises:
        OSError: The folder cannot be read, or the file cannot be written.
    """
    exported = ExportedRun()
    processes: list[_Process] = []
    for rank, paths in log_files(folder).items():
        if not ranks or rank in ranks:
            processes += _processes(paths, job, exported)
    for family, groups in _families(processes, exported):
        kind = family.kind if family.kind != "untyped" else "unknown"
        name = family.name.removesuffix(_ENDINGS.get(kind, ""))
        out.write(f"# HELP {name} {_escaped(family.help)}\n# TYPE {name} {kind}\n")
        for group in groups:
            _write_group(group, out, exported)
    out.write("# EOF\n")
    return exported


def _processes(paths: list[Path], job: str, exported: ExportedRun) -> list[_Process]:
    """Return the processes of one rank."""
    found: dict[float, _Process] = {}
    for snapshot in read_snapshots(paths, exported.problems):
        process = found.get(snapshot.session)
        if process is None:
            process = found[snapshot.session] = _Process(target=_target(snapshot.head, job))
            exported.run_id = snapshot.head.run_id
            exported.interval_seconds = max(
                exported.interval_seconds, snapshot.head.interval_seconds
            )
        process.add(snapshot.unix_seconds, snapshot.values)
    return [found[session] for session in sorted(found)]


def _target(head: MetricsHead, job: str) -> dict[str, str]:
    """Return the labels that Prometheus adds to the series of a rank."""
    return {
        "job": job,
        "instance": head.instance or head.host,
        "run": head.run_id,
        "node": head.node,
        "rank": str(head.rank),
    }


def _families(
    processes: Iterable[_Process], exported: ExportedRun
) -> Iterator[tuple[Family, list[list[_Member]]]]:
    """Yield the families by name, each with groups of series that are one observation."""
    families: dict[str, Family] = {UP.name: UP}
    keys: dict[str, list[tuple[_Process, SeriesKey | None]]] = {UP.name: []}
    for process in processes:
        keys[UP.name].append((process, None))
        for series in process.columns:
            families.setdefault(series.family.name, series.family)
            keys.setdefault(series.family.name, []).append((process, series))
    for name in sorted(families) if keys[UP.name] else ():
        groups: dict[str, dict[str, _Member]] = {}
        for process, key in keys[name]:
            labels = dict(sorted(process.target.items())) if key is None else process.labels(key)
            sample = name if key is None else key.name
            head = _head(sample, labels)
            whole = {label: text for label, text in labels.items() if label not in _PART_LABELS}
            group = groups.setdefault(_head("", whole), {})
            if head not in group:
                group[head] = _Member(head=head)
                exported.series.append((sample, labels))
            column = None if key is None else process.columns[key]
            group[head].columns.append((process, column))
        yield families[name], [list(groups[head].values()) for head in sorted(groups)]


def _write_group(group: list[_Member], out: TextIO, exported: ExportedRun) -> None:
    """Write series that are one observation: all of its values, one moment after the other.

    They are sorted by time, as Prometheus requires, because a clock may have been set back. Of two
    samples of the same millisecond the later one is written.
    """
    moments: dict[int, dict[str, float]] = {}
    for member in group:
        for milliseconds, value in member.samples():
            moments.setdefault(milliseconds, {})[member.head] = value
    for milliseconds in sorted(moments):
        for head, value in moments[milliseconds].items():
            seconds = f"{milliseconds // 1000}.{milliseconds % 1000:03d}"
            out.write(f"{head} {_number(value)} {seconds}\n")
        exported.num_samples += len(moments[milliseconds])
    exported.first_seconds = min(exported.first_seconds, min(moments, default=math.inf) / 1000)
    exported.last_seconds = max(exported.last_seconds, max(moments, default=-math.inf) / 1000)


def _head(name: str, labels: dict[str, str]) -> str:
    """Return the name and the labels of a series as they begin a line."""
    texts = (f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{','.join(texts)}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    """Return a value as OpenMetrics writes it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
