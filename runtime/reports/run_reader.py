"""Reads a run folder: the steps of each rank as numpy columns, decisions, reports and settings.

It reads what is there, and lists in `problems` what is missing, damaged or cut. It imports neither
torch nor deepspeed, so a copied run folder can be read on any machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from ...errors import ZerowatchError
from ...metrics.atomic_file import regular_file_status
from ...metrics.metrics_line import MAX_UNIX_SECONDS
from ...metrics.step_record import SCHEMA_VERSION
from ..common.exit_notes import unreported_notes
from ..common.liveness_file import SUFFIX
from ..common.plain_text import printable
from ..common.report_files import RESUMED, utc_text

Column = NDArray[Any]  # float32; `ended_at` is float64, the columns of `_COUNTS` are int64
ReportKind = Literal["out_of_memory", "leak", "hang", "exit"]

# Values of all columns of all ranks that are kept; 256 MiB. A longer run has several steps per row.
MAX_VALUES = 64 * 2**20
# Bytes that are read at once.
_CHUNK_BYTES = 4 * 2**20
# Ranks make their steps together, and write them within this time.
MAX_LAG_SECONDS = 30.0
# As in `runtime/monitor/step_log.py`, which is above this package: in jobs of more ranks, only one
# rank per node records every step, the others each tenth.
FULL_LOG_WORLD_SIZE = 64
LONGEST_GAP = 10  # steps between two records of most ranks of a large job
LAST_STEPS = 10  # the last loss is their mean, because batches differ; at most a tenth of the run
# A line longer than this is no step record.
_MAX_LINE_BYTES = 2**20
# Larger report files are cut; most of a long hang report are stacks of other threads.
MAX_REPORT_BYTES = 64 * 1024
_END_BYTES = 256  # the end of a report, which says whether a hang has ended
MAX_REPORTS_PER_KIND = 50
MAX_DECISIONS = 10_000

# Column name by field of the record. Values that a step does not have are NaN.
_SCALARS = {
    "step": "step",
    "ended_at_unix_seconds": "ended_at",
    "seconds": "seconds",
    "attempt": "attempt",
    "world_size": "world_size",
    "micro_batches": "micro_batches",
    "samples": "samples",
    "tokens": "tokens",
    "loss": "loss",
    "nonfinite_loss": "nonfinite_loss",
    "gradient_norm": "gradient_norm",
    "learning_rate": "learning_rate",
    "loss_scale": "loss_scale",
    "skipped": "skipped",
    "comm_seconds": "comm_seconds",
    "comm_exposed_seconds": "comm_exposed_seconds",
}
_COUNTS = ("step", "attempt", "world_size")
_TYPES: Mapping[str, type] = {"ended_at": np.float64, **dict.fromkeys(_COUNTS, np.int64)}
_COLLECTIVE_FIELDS = ("calls", "payload_bytes", "wire_bytes", "seconds")
_GENERATION_FIELDS = ("calls", "sequences", "tokens", "seconds", "collectives", "gathered_bytes")
# Fields of a record that hold the same in all records of a process, with their types.
_IDENTITY: Mapping[str, type] = {"schema": int, "world_size": int, "local_rank": int, "host": str}
# More steps than an exact float can count, and more ranks than this, are damage.
_MAX_STEP = 2**53
_MAX_RANKS = 10**6
# What a line raises that is not as `StepRecord` is written.
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
_SEGMENT = re.compile(r"rank-(\d+)(?:\.(\d+))?\.jsonl")


class RunFolderError(ZerowatchError):
    """The folder does not exist, or holds no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTotals:
    """Exact totals of a column over all recorded steps, also where a row holds several steps.

    Attributes:
        sum: Sum of the known values.
        count: Number of known values.
        minimum: Smallest known value; NaN if none is known.
        maximum: Largest known value; NaN if none is known.
    """

    sum: float = 0.0
    count: int = 0
    minimum: float = np.nan
    maximum: float = np.nan

    @property
    def mean(self) -> float | None:
        """Mean of the known values; None if none is known."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps that one rank has recorded, in the order of the log.

    A restart repeats the steps since its checkpoint, so `step` may decrease where `attempt`
    increases.

    Attributes:
        rank: The global rank.
        local_rank: The rank on its host.
        host: Name of the host; of the last attempt.
        world_size: Number of ranks; of the last attempt.
        num_steps: Number of records.
        first_step: Number of the first step.
        num_lost: Number of records that are missing between those of an attempt.
        spans: First step, last step and number of ranks of each part of the log between restarts,
            as rows, the oldest first. An attempt may have several.
        usual_gap: Steps from one record to the next in the last attempt: 1, or 10 for most ranks of
            a large job.
        steps_per_row: 1, or the number of successive steps in a row if the run is too long to be
            kept in memory. Such a row has the mean of its steps, of memory the maximum, and of
            `step`, `ended_at`, `attempt` and `world_size` the last value.
        columns: Values by name, all of the same length. NaN if a step has no such value.

            - `step`, `attempt`, `world_size`, `ended_at` (Unix seconds), `seconds`,
              `micro_batches`, `samples`, `tokens`, `loss`, `gradient_norm`, `learning_rate`,
              `loss_scale`, `skipped`, `nonfinite_loss` (0 or 1), `comm_seconds`,
              `comm_exposed_seconds`
            - `phase.<phase>`: seconds; 0 where the phase did not occur
            - `comm_exposed.<phase>`: seconds
            - `collective.<op>.calls|payload_bytes|wire_bytes|seconds`: 0 where none was called
            - `memory.<device>.<state>`: bytes; most steps are not read
            - `device.<device>.<reading>`, `oom_risk.<device>`
            - `generation.calls|sequences|tokens|seconds|collectives|gathered_bytes`
        totals: Exact totals by the same names.
        num_losses: Number of steps with a loss, finite or not.
        last_losses: Number and loss of each of the last of these steps, at most LAST_STEPS, as
            rows. The loss is NaN if it was not finite.
        is_upper_bound: Whether `comm_seconds` of some step is only an upper bound, as on a GPU.

    Examples:
        >>> run = read_run(Path("runs/20261123T005552-c44904"))
        >>> run.ranks[0].total("phase.forward")
        21.4
    """

    rank: int
    local_rank: int
    host: str
    world_size: int
    num_steps: int
    first_step: int
    num_lost: int
    spans: NDArray[np.int64]
    usual_gap: int
    steps_per_row: int
    columns: Mapping[str, Column]
    totals: Mapping[str, ColumnTotals]
    num_losses: int
    last_losses: NDArray[np.float64]
    is_upper_bound: bool

    def column(self, name: str) -> Column:
        """Return a column; all NaN if no step has it."""
        known = self.columns.get(name)
        return np.full(self.num_rows, np.nan, np.float32) if known is None else known

    def total(self, name: str) -> float | None:
        """Return the sum of a column over all recorded steps; None if no step has a value."""
        totals = self.totals.get(name)
        return totals.sum if totals is not None and totals.count else None

    def names(self, prefix: str) -> list[str]:
        """Return the columns whose names begin with a prefix and a dot, without both."""
        return [name[len(prefix) + 1 :] for name in self.columns if name.startswith(f"{prefix}.")]

    @property
    def num_rows(self) -> int:
        """Length of each column."""
        return len(self.columns["step"])

    @property
    def is_thinned(self) -> bool:
        """Whether the rank records only every tenth step, and no metrics, in the last attempt."""
        return _is_thinned(self.world_size, self.local_rank)

    @property
    def was_thinned(self) -> bool:
        """Whether the rank recorded only every tenth step in some attempt."""
        return any(_is_thinned(size, self.local_rank) for size in self.spans[:, 2].tolist())

    def first_possible_step(self, row: int) -> int:
        """Return the first step that may have been as that of a row, and was not recorded before.

        It is the step of the row itself if the rank recorded every step then.
        """
        steps = self.columns["step"]
        last = int(steps[row])
        if not _is_thinned(int(self.columns["world_size"][row]), self.local_rank):
            return last
        before = int(steps[row - 1]) if row else 0
        return max(last - LONGEST_GAP, before if before < last else 0, 0) + 1


def _is_thinned(world_size: int, local_rank: int) -> bool:
    return world_size > FULL_LOG_WORLD_SIZE and local_rank != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """A report on an error that monitoring wrote into the run folder.

    Attributes:
        kind: What is reported.
        path: The file.
        rank: The rank that it is about; None if the name of the file does not state it.
        headline: Its first line, which states the finding.
        text: The whole text, at most MAX_REPORT_BYTES.
        has_resumed: Whether training made progress again after the hang that is reported.
    """

    kind: ReportKind
    path: Path
    rank: int | None
    headline: str
    text: str
    has_resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What a run folder holds.

    Attributes:
        folder: The run folder.
        run_id: The id in the records; the name of the folder if there are none.
        world_size: Number of ranks; of the last attempt. None if it is not recorded.
        settings: Settings of the run, nested by section; empty if the file is missing.
        ds_config: The ds config with which the last attempt started, without secrets. None if it
            was not recorded: there is no DeepSpeed, or an older zerowatch has written the run.
        ranks: The steps by rank, ascending. A rank without a log is missing.
        attempts: When each attempt of the run started, in Unix seconds.
        decisions: The tuner's decisions and advice, oldest first, as `decisions.jsonl` has them.
        reports: Reports on errors, by kind, the oldest first.
        unclosed: Ranks that have not removed their liveness files: they are active, or were killed.
        has_targets: Whether addresses of ranks are listed: while the run is active, and after a
            failure. None if the file is missing.
        problems: What is missing, damaged or cut, and where; one sentence each.
    """

    folder: Path
    run_id: str
    world_size: int | None
    settings: Mapping[str, Any]
    ds_config: Mapping[str, Any] | None
    ranks: Mapping[int, RankSteps]
    attempts: tuple[float, ...]
    decisions: tuple[Mapping[str, Any], ...]
    reports: tuple[ReportFile, ...]
    unclosed: tuple[int, ...]
    has_targets: bool | None
    problems: list[str]

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the run; None if it is not recorded."""
        return _setting(self.settings, section, name)

    @property
    def ranks_at_end(self) -> Mapping[int, RankSteps]:
        """The ranks of the last attempt. An elastic job may have had more before."""
        return {rank: steps for rank, steps in self.ranks.items() if rank < (self.world_size or 0)}


def _setting(settings: Mapping[str, Any], section: str, name: str) -> Any:
    values = settings.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


def read_run(folder: Path, *, max_values: int = MAX_VALUES) -> RecordedRun:
    """Read a run folder. Damaged parts are left out, and listed in `problems`.

    Args:
        folder: The run folder, such as `runs/20261123T005552-c44904`.
        max_values: Values of all columns that are kept. It limits the memory of the result, which
            has 4 bytes per value.

    Raises:
        RunFolderError: There is no such folder, or nothing in it is of a run.

    Examples:
        >>> run = read_run(Path("runs/20261123T005552-c44904"))
        >>> run.ranks[0].column("seconds").mean()
        0.31
    """
    _check_folder(folder)
    problems: list[str] = []
    segments = _segments(folder)
    # An active run writes on. In a large run, each rank takes seconds to read. What is added
    # meanwhile is left out of all ranks: the first ones would seem to lack it.
    sizes = {rank: _sizes(folder, rank, paths) for rank, paths in segments.items()}
    num_bytes = sum(size for by_file in sizes.values() for size in by_file.values())
    attempts = _read_attempts(folder, problems)
    ranks: dict[int, RankSteps] = {}
    num_segments: dict[int, int] = {}
    run_ids: dict[str, None] = {}
    for rank, paths in segments.items():
        with ExitStack() as opened:
            logs = _opened(folder, rank, paths, sizes[rank], opened, problems)
            steps = _read_rank(rank, logs, attempts, num_bytes, max_values, run_ids, problems)
        if steps is not None:
            # Of a log that was full, the oldest segment may have been deleted meanwhile.
            ranks[rank], num_segments[rank] = steps, len(paths)
    settings, decisions, has_targets = _read_small_files(folder, problems)
    max_segments = _setting(settings, "run_log", "max_segments")
    longest = max(ranks.values(), key=lambda steps: steps.num_steps, default=None)
    for rank, steps in ranks.items():
        problems += _missing_steps(steps, longest or steps, num_segments[rank], max_segments)
    newest = max(ranks.values(), key=lambda steps: steps.columns["ended_at"][-1], default=None)
    world_size = None if newest is None else newest.world_size
    problems += _missing_ranks(ranks, world_size)
    if newest is not None:
        problems += _missing_ends(ranks, newest)
    if len(run_ids) > 1:
        problems.append(f"the records have several run ids: {', '.join(run_ids)}")
    return RecordedRun(
        folder=folder,
        run_id=next(iter(run_ids), printable(folder.resolve().name)),
        world_size=world_size,
        settings=settings,
        ds_config=_read_json(folder / "ds_config.json", dict, problems),
        ranks=ranks,
        attempts=attempts,
        decisions=decisions,
        reports=(*_read_reports(folder, problems), *_unreported_exits(folder, ranks, problems)),
        unclosed=tuple(_unclosed(folder)),
        has_targets=has_targets,
        problems=problems,
    )


def _check_folder(folder: Path) -> None:
    if not os.path.isdir(folder):
        raise RunFolderError(f"{folder} is no folder; give the folder of a run, runs/<run_id>")
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be read: {error.strerror or error}; it belongs to another user, or "
            "its file system fails"
        ) from None
    is_run = {"settings.json", "attempts.jsonl", "run.lock", "decisions.jsonl"} & names
    if is_run or any(re.match(r"(rank|metrics)-\d+\.|hang-rank-", name) for name in names):
        return
    # Unlike `Path.is_file`, this is False where a folder of another user may not be searched.
    runs = sorted(name for name in names if os.path.isfile(folder / name / "settings.json"))
    if runs:
        raise RunFolderError(
            f"{folder} holds {len(runs)} run{'s' * (len(runs) > 1)}; give the folder of one, "
            f"such as {folder / runs[-1]}"
        )
    raise RunFolderError(
        f"{folder} holds no run: none of rank-<r>.jsonl, settings.json and attempts.jsonl"
    )


def _segments(folder: Path) -> dict[int, list[Path]]:
    """Return the files of each rank's log, the oldest segment first."""
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        match = _SEGMENT.fullmatch(path.name)
        if match and os.path.isfile(path):
            found.setdefault(int(match[1]), []).append((int(match[2] or 0), path))
    return {rank: [path for _, path in sorted(found[rank], reverse=True)] for rank in sorted(found)}


# Sizes of the segments of a rank, by device and inode: a segment keeps them if it is renamed.
_Sizes = Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """An open segment, and how many of its bytes are read."""

    file: BinaryIO
    size: int


def _newest_first(rank: int, paths: Sequence[Path]) -> Iterator[str]:
    """Yield the names of a rank's segments, the oldest first in `paths`, and the next older name.

    The run may rotate its log meanwhile: each segment then has the name of the next older one. From
    the newest to the oldest, none is missed, but a segment may be met under two names.
    """
    yield from (path.name for path in reversed(paths))
    oldest = _SEGMENT.fullmatch(paths[0].name)
    age = int(oldest[2] or 0) if oldest else 0
    yield f"rank-{rank}.{age + 1}.jsonl"


def _sizes(folder: Path, rank: int, paths: Sequence[Path]) -> _Sizes:
    """Return the sizes of a rank's segments."""
    found: dict[tuple[int, int], int] = {}
    for name in _newest_first(rank, paths):
        with contextlib.suppress(OSError):  # it was rotated or deleted meanwhile
            status = (folder / name).stat()
            found.setdefault((status.st_dev, status.st_ino), status.st_size)
    return found


def _opened(
    folder: Path,
    rank: int,
    paths: Sequence[Path],
    sizes: _Sizes,
    files: ExitStack,
    problems: list[str],
) -> list[_Log]:
    """Open all segments of a rank before reading any, the oldest first."""
    found: dict[tuple[int, int], BinaryIO] = {}
    for name in _newest_first(rank, paths):
        try:
            file = files.enter_context((folder / name).open("rb"))
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        status = os.fstat(file.fileno())
        found.setdefault((status.st_dev, status.st_ino), file)
    # A segment that was begun since is left out; if it has the inode of a deleted one, it is
    # smaller. If all are unknown, as in file systems whose inodes change, all are read.
    now = {key: os.fstat(file.fileno()).st_size for key, file in found.items()}
    known = {key: sizes[key] for key, size in now.items() if size >= sizes.get(key, math.inf)}
    return [_Log(file=found[key], size=size) for key, size in reversed((known or now).items())]


def _read_rank(
    rank: int,
    logs: Sequence[_Log],
    attempts: Sequence[float],
    num_bytes: int,
    max_values: int,
    run_ids: dict[str, None],
    problems: list[str],
) -> RankSteps | None:
    """Read one rank's log.

    Args:
        rank: The rank.
        logs: Its open segments, oldest first.
        attempts: When each attempt of the run started, in Unix seconds.
        num_bytes: Bytes of the logs of all ranks, from which the rows of a step are chosen.
        max_values: Values of all columns of all ranks to keep.
        run_ids: Gets the run ids in the records.
        problems: Gets what is missing or damaged.
    """
    columns: _Columns | None = None
    gaps = _Gaps(attempts)
    identity: dict[str, Any] = {}
    is_upper_bound = False
    for log in logs:
        lines = _Lines(log)
        for records, block in _parsed(lines):
            for record in (records[0], records[-1]):
                run_ids[printable(record.get("run_id"))] = None
            identity = records[-1]
            is_upper_bound |= any(record.get("comm_seconds_is_upper_bound") for record in records)
            if columns is None:
                line_bytes = len(orjson.dumps(records[0]))
                num_values = num_bytes / line_bytes * len(block)
                columns = _Columns(max(1, int(np.ceil(num_values / max_values))))
            columns.add(block)
            gaps.add(block)
        problems += lines.problems
    if columns is None:
        if logs and not any(log.size for log in logs):
            problems.append(f"rank-{rank}.jsonl is empty: the rank recorded no step")
        return None
    gaps.finish()
    return RankSteps(
        rank=rank,
        local_rank=identity["local_rank"],
        host=printable(identity["host"]),
        world_size=identity["world_size"],
        num_steps=columns.num_steps,
        first_step=columns.first_step,
        num_lost=gaps.num_lost,
        spans=gaps.spans,
        usual_gap=gaps.usual,
        steps_per_row=columns.steps_per_row,
        columns=columns.finished(),
        totals=columns.totals,
        num_losses=columns.num_losses,
        last_losses=columns.last_losses,
        is_upper_bound=is_upper_bound,
    )


class _Lines:
    """Yields the lines of a file in blocks. What cannot be read is listed in `problems`."""

    def __init__(self, log: _Log) -> None:
        self.name = Path(log.file.name).name
        self._file, self._size = log.file, log.size
        self.problems: list[str] = []
        self.num_bad = 0

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield the lines of each few megabytes, without those that are empty."""
        rest = b""
        is_skipping = False  # within a line that is too long
        try:
            left = self._size
            while chunk := self._file.read(min(_CHUNK_BYTES, left)):
                left -= len(chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                if lines and is_skipping:
                    del lines[0]
                    is_skipping = False
                if is_skipping:
                    rest = b""
                elif len(rest) > _MAX_LINE_BYTES:
                    self.num_bad += 1
                    rest, is_skipping = b"", True
                yield [line for line in lines if line]
        except OSError as error:
            self.problems.append(f"{self.name} cannot be read: {error.strerror or error}")
        if rest:
            # Each record is written at once, so that only a full disk or a copy cuts a line. Or it
            # was not whole yet when the sizes were read.
            try:
                orjson.loads(rest)
            except ValueError:
                if not self._has_grown():
                    self.problems.append(
                        f"{self.name}: the last line is cut after {len(rest)} bytes and left out"
                    )
            else:
                yield [rest]
        if self.num_bad:
            self.problems.append(f"{self.name}: {self.num_bad} damaged line(s) are left out")

    def _has_grown(self) -> bool:
        return os.fstat(self._file.fileno()).st_size > self._size


def _parsed(lines: _Lines) -> Iterator[tuple[list[dict[str, Any]], dict[str, Column]]]:
    """Yield the records and columns of each block; damaged lines are counted and left out."""
    newer: set[int] = set()
    for block in lines.blocks():
        try:
            records = [orjson.loads(line) for line in block]
            columns = _columns_of(records)
        except _DAMAGE:
            records = list(_sound_records(block))
            columns = _columns_of(records)
            lines.num_bad += len(block) - len(records)
        newer |= {record["schema"] for record in records if record["schema"] != SCHEMA_VERSION}
        if records:
            yield records, columns
    if newer:
        lines.problems.append(
            f"{lines.name} has the schema {', '.join(map(str, sorted(newer)))} instead of "
            f"{SCHEMA_VERSION}: it is of another version of zerowatch, and may be misread"
        )


def _sound_records(block: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in block:
        try:
            record = orjson.loads(line)
            _columns_of([record])
        except _DAMAGE:
            continue
        yield record


def _columns_of(records: Sequence[dict[str, Any]]) -> dict[str, Column]:
    """Return the columns of some records.

    Raises:
        AttributeError, KeyError, OverflowError, TypeError, ValueError: A record is not as
            `StepRecord` is written.
    """
    for key, kind in _IDENTITY.items():
        if any(type(record[key]) is not kind for record in records):
            raise TypeError(key)
    if any(record["world_size"] > _MAX_RANKS for record in records):
        raise ValueError("world_size")
    columns: dict[str, Column] = {
        name: _array(list(map(itemgetter(key), records)), _TYPES.get(name, np.float32))
        for key, name in _SCALARS.items()
    }
    times, numbers = columns["ended_at"], columns["step"]
    if not (np.abs(times) < MAX_UNIX_SECONDS).all() or not np.isfinite(columns["seconds"]).all():
        raise ValueError("a step without a time")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < _MAX_STEP:
        raise ValueError("no number of a step")
    nested = {
        key: [record.get(key) or {} for record in records]
        for key in (
            "phase_seconds",
            "comm_exposed_phase_seconds",
            "collectives",
            "memory_bytes",
            "device_readings",
            "oom_risk_ratio",
            "generation",
        )
    }
    _add(columns, "phase", nested["phase_seconds"], absent=0.0)
    _add(columns, "comm_exposed", nested["comm_exposed_phase_seconds"], absent=0.0)
    for op in _keys(nested["collectives"]):
        totals = [by_op.get(op) for by_op in nested["collectives"]]
        for name in _COLLECTIVE_FIELDS:
            columns[f"collective.{op}.{name}"] = _array(
                [0.0 if total is None else total[name] for total in totals]
            )
    for prefix, key in (("memory", "memory_bytes"), ("device", "device_readings")):
        for device in _keys(nested[key]):
            readings = [by_device.get(device) or {} for by_device in nested[key]]
            _add(columns, f"{prefix}.{device}", readings)
    _add(columns, "oom_risk", nested["oom_risk_ratio"])
    if any(nested["generation"]):
        for name in _GENERATION_FIELDS:
            values = [totals.get(name, 0) for totals in nested["generation"]]
            columns[f"generation.{name}"] = _array(values)
    return columns


def _array(values: Sequence[Any], dtype: type = np.float32) -> Column:
    """Return numbers as an array; one whose values are lists is refused.

    A number that is too large for the type is unknown: an infinite one would spoil all sums.
    """
    with np.errstate(over="ignore"):
        column: Column = np.array(values, dtype)
    if column.ndim != 1:
        raise ValueError("a list in place of a number")
    if dtype is np.float32:
        column[np.isinf(column)] = np.nan
    return column


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _add(
    columns: dict[str, Column],
    prefix: str,
    mappings: Sequence[Mapping[str, Any]],
    absent: float | None = None,
) -> None:
    """Add a column for each key of the mappings."""
    for key in _keys(mappings):
        values = [mapping.get(key, absent) for mapping in mappings]
        columns[f"{prefix}.{key}"] = _array(values)


class _Columns:
    """Joins the columns of blocks, and folds several steps into a row.

    Args:
        steps_per_row: Successive steps in a row.

    Attributes:
        totals: Exact totals by column so far.
        num_steps: Number of steps so far.
        first_step: Number of the first step.
        num_losses: Number of steps with a loss so far.
        last_losses: See `RankSteps.last_losses`.
    """

    def __init__(self, steps_per_row: int) -> None:
        self.steps_per_row = steps_per_row
        self.totals: dict[str, ColumnTotals] = {}
        self.num_steps = 0
        self.first_step = 0
        self.num_losses = 0
        self.last_losses = np.empty((0, 2))
        self._parts: dict[str, list[Column]] = {}
        self._rows: list[int] = []  # of each part
        self._held: dict[str, Column] = {}  # the steps of an incomplete row

    def add(self, block: dict[str, Column]) -> None:
        """Add the columns of some steps."""
        numbers = block["step"]
        num_steps = len(numbers)
        if not self.num_steps:
            self.first_step = int(numbers[0])
        self.num_steps += num_steps
        for name, values in block.items():
            self.totals[name] = _added(self.totals.get(name, ColumnTotals()), values)
        self._add_losses(numbers, block["loss"], block["nonfinite_loss"] > 0)
        if self.steps_per_row == 1:
            self._append(block, num_steps)
            return
        block = _joined([self._held, block])
        whole = len(block["step"]) // self.steps_per_row * self.steps_per_row
        self._held = {name: values[whole:] for name, values in block.items()}
        if whole:
            rows = {
                name: _folded(name, values[:whole].reshape(-1, self.steps_per_row))
                for name, values in block.items()
            }
            self._append(rows, whole // self.steps_per_row)

    def finished(self) -> dict[str, Column]:
        """Return all columns; call this once, at the end."""
        if self._held and len(self._held["step"]):
            rows = {
                name: _folded(name, values.reshape(1, -1)) for name, values in self._held.items()
            }
            self._append(rows, 1)
        # One column after another, so that the memory of only one is taken twice.
        return {name: np.concatenate(self._parts.pop(name)) for name in list(self._parts)}

    def _add_losses(self, numbers: Column, losses: Column, is_bad: NDArray[np.bool_]) -> None:
        is_known = is_bad | ~np.isnan(losses)
        self.num_losses += int(is_known.sum())
        known = np.column_stack((numbers, np.where(is_bad, np.nan, losses)))[is_known]
        self.last_losses = np.concatenate((self.last_losses, known))[-LAST_STEPS:]

    def _append(self, block: dict[str, Column], num_rows: int) -> None:
        for name in self._parts.keys() - block.keys():
            self._parts[name].append(_absent(name, num_rows))
        for name, values in block.items():
            if name not in self._parts:
                self._parts[name] = [_absent(name, rows) for rows in self._rows]
            self._parts[name].append(values)
        self._rows.append(num_rows)


class _Gaps:
    """Counts the records that are missing between those of a rank, apart for each attempt.

    A rank may be absent in an attempt, and how many steps it records depends on the number of
    ranks. So each attempt has its own usual gap, and what a gap between two attempts lacks depends
    on what other ranks have recorded; see `_num_lost_between`.

    Args:
        attempts: When each attempt of the run started, in Unix seconds. An attempt is noted at
            about the end of its first step, so it begins with the row before that time or after it.

    Attributes:
        num_lost: Number of missing records in the attempts that have ended.
    """

    def __init__(self, attempts: Sequence[float]) -> None:
        self.num_lost = 0
        self._restarts = np.sort(attempts)[1:]
        self._counts: Counter[int] = Counter()  # of the gaps of this attempt
        self._rows = np.empty((4, 0), np.int64)  # the last two, of which the gap is not counted
        self._spans: list[tuple[int, int, int]] = []  # of the attempts that have ended
        self._first = 0  # step of this attempt

    def add(self, block: dict[str, Column]) -> None:
        """Add the records of some steps."""
        number = np.searchsorted(self._restarts, block["ended_at"], side="right")
        rows = np.stack([block["step"], block["attempt"], block["world_size"], number])
        if not self._rows.size:
            self._first = int(block["step"][0])
        self._rows = np.hstack([self._rows, rows])
        self._count(max(0, self._rows.shape[1] - 2))

    def finish(self) -> None:
        """Count the last gap; call this once, at the end."""
        self._count(self._rows.shape[1] - 1)
        self.num_lost += self._num_lost()
        self._end_span(0)

    @property
    def spans(self) -> NDArray[np.int64]:
        """The spans of steps; see `RankSteps.spans`."""
        return np.array(self._spans, np.int64).reshape(-1, 3)

    @property
    def usual(self) -> int:
        """The median of the gaps of this attempt: 1, or 10 for most ranks of a large job."""
        if not self._counts:
            return LONGEST_GAP
        gaps = sorted(self._counts)
        numbers = np.cumsum([self._counts[gap] for gap in gaps])
        return gaps[int(np.searchsorted(numbers, numbers[-1] / 2))]

    def _count(self, num_gaps: int) -> None:
        gaps, *changes, noted = np.diff(self._rows)
        is_start = (gaps <= 0) | np.any(changes, axis=0) | (noted != 0)
        is_start[:-1] |= noted[1:] != 0
        starts = np.flatnonzero(is_start[:num_gaps])
        own, *others = np.split(gaps[:num_gaps], starts)
        self._counts.update(own.tolist())
        for start, part in zip(starts.tolist(), others, strict=True):
            self.num_lost += self._num_lost()
            self._counts = Counter(part[1:].tolist())
            self._end_span(start)
            self._first = int(self._rows[0, start + 1])
        self._rows = self._rows[:, num_gaps:]

    def _end_span(self, row: int) -> None:
        last, _, world_size, _ = self._rows[:, row].tolist()
        self._spans.append((self._first, last, world_size))

    def _num_lost(self) -> int:
        usual = self.usual
        return sum(count * ((gap - 1) // usual) for gap, count in self._counts.items())


def _joined(blocks: Sequence[dict[str, Column]]) -> dict[str, Column]:
    """Return the columns of successive blocks."""
    blocks = [block for block in blocks if block]
    columns = _Columns(1)
    for block in blocks:
        columns._append(block, len(block["step"]))
    return columns.finished()


def _absent(name: str, num_rows: int) -> Column:
    """Return the values of a column for steps that do not have it; see `RankSteps.columns`."""
    is_zero = name.startswith(("phase.", "comm_exposed.", "collective.", "generation."))
    return np.full(num_rows, 0.0 if is_zero else np.nan, np.float32)


def _folded(name: str, values: Column) -> Column:
    """Return one value for each row of steps; see `RankSteps.steps_per_row`."""
    if name in _TYPES:
        last: Column = values[:, -1]
        return last
    known = ~np.isnan(values)
    if name.startswith(("memory.", "oom_risk.")):
        highest = np.where(known, values, -np.inf).max(axis=1)
        return np.where(known.any(axis=1), highest, np.nan).astype(np.float32)
    count = known.sum(axis=1)
    total = np.where(known, values, 0).sum(axis=1, dtype=np.float64)
    mean = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    folded: Column = mean.astype(np.float32)
    return folded


def _added(totals: ColumnTotals, values: Column) -> ColumnTotals:
    known = values if values.dtype == np.int64 else values[~np.isnan(values)]
    if not known.size:
        return totals
    return ColumnTotals(
        sum=totals.sum + float(known.sum(dtype=np.float64)),
        count=totals.count + known.size,
        minimum=float(np.fmin(totals.minimum, known.min())),
        maximum=float(np.fmax(totals.maximum, known.max())),
    )


def _missing_ranks(ranks: Mapping[int, RankSteps], world_size: int | None) -> list[str]:
    if world_size is None:
        return ["no step is recorded: there is no readable rank-<r>.jsonl"]
    ranks_per_log, is_certain = 1, True
    if not has_tenth_step(ranks.values(), world_size):
        # So far only the first rank of each node has recorded a step.
        firsts = sorted({steps.rank - steps.local_rank for steps in ranks.values()})
        ranks_per_log = 1 + max(0, *(steps.local_rank for steps in ranks.values()))
        if ranks_per_log == 1:  # unknown
            is_certain = False
            ranks_per_log = firsts[1] - firsts[0] if len(firsts) > 1 else 1
        if any(first % ranks_per_log for first in firsts):  # nodes of different sizes, or lost logs
            ranks_per_log, is_certain = 1, False
    missing = [rank for rank in range(0, world_size, ranks_per_log) if rank not in ranks]
    if not missing:
        return []
    if not is_certain:
        return [
            f"logs of {sum(rank < world_size for rank in ranks)} of {world_size} ranks: so far, "
            "one rank per node has recorded a step, and some of their logs may be missing"
        ]
    return [f"no steps of {len(missing)} of {world_size} ranks: {number_ranges(missing)}"]


def has_tenth_step(ranks: Iterable[RankSteps], world_size: int) -> bool:
    """Whether each rank of the last attempt has recorded a step; see FULL_LOG_WORLD_SIZE."""
    if world_size <= FULL_LOG_WORLD_SIZE:
        return True
    for steps in ranks:
        own = steps.columns["step"][steps.columns["world_size"] == world_size]
        if steps.steps_per_row > 1 or (own % LONGEST_GAP == 0).any():
            return True
    return False


def _missing_ends(ranks: Mapping[int, RankSteps], newest: RankSteps) -> Iterator[str]:
    """Yield the ranks that lack steps at the end.

    Args:
        ranks: All ranks.
        newest: The one with the newest step. Higher ranks than its attempt has have left the job.
    """
    most = int(newest.columns["step"][-1])
    for steps in ranks.values():
        own = int(steps.columns["step"][-1])
        lag = float(newest.columns["ended_at"][-1] - steps.columns["ended_at"][-1])
        gap = LONGEST_GAP if _is_thinned(newest.world_size, steps.local_rank) else steps.usual_gap
        is_due = steps.rank < newest.world_size and own + gap <= most
        if is_due and lag > MAX_LAG_SECONDS:
            yield f"rank {steps.rank}: its log ends with step {own:,} of {most:,}"


def _missing_steps(
    steps: RankSteps, reference: RankSteps, num_segments: int, max_segments: Any
) -> Iterator[str]:
    """Yield what is missing at the beginning and within the steps of a rank.

    Args:
        steps: The steps of the rank.
        reference: The rank with the most steps.
        num_segments: Number of segments of its log.
        max_segments: The setting of the run; None if it is not recorded.
    """
    first = steps.first_step
    is_full = num_segments >= max(2, max_segments if isinstance(max_segments, int) else 0)
    if first > LONGEST_GAP and is_full:
        yield (
            f"rank {steps.rank}: steps 1 to {first - 1} are missing: older segments of the log "
            "were deleted (run_log.max_segments)"
        )
    num_lost = steps.num_lost + _num_lost_between(steps, reference, first if is_full else 0)
    if num_lost:
        yield f"rank {steps.rank}: {num_lost} steps are missing in the log"


def _num_lost_between(steps: RankSteps, reference: RankSteps, since: int) -> int:
    """Return how many steps a rank lacks before and between the spans of its log.

    It lacks those that it never recorded, though a reference shows that it was part of the job. A
    rank may begin its first span later than the others.

    Args:
        steps: The steps of the rank.
        reference: The rank with the most steps.
        since: The first step that counts.
    """
    made, own = reference.spans[steps.rank < reference.spans[:, 2]], steps.spans.copy()
    begun = made[(made[:, 0] <= own[0, 0]) & (own[0, 0] <= made[:, 1]), 0]
    own[0, 0] = min([own[0, 0], *begun])

    def ends_of(spans: NDArray[np.int64]) -> NDArray[np.int64]:
        return (spans[:, :2] + [0, 1]).clip(since, own[-1, 1])

    bounds = np.unique(ends_of(np.concatenate([own, made])))
    # A span has all steps from one bound up to the next, or none of them.
    firsts, lasts = bounds[:-1], bounds[1:] - 1

    def is_in(spans: NDArray[np.int64]) -> NDArray[np.bool_]:
        begins, ends = np.searchsorted(bounds, ends_of(spans)).T
        changes = (np.bincount(each, minlength=len(bounds)) for each in (begins, ends))
        return np.cumsum(np.subtract(*changes))[:-1] > 0

    is_thinned = np.array([_is_thinned(size, steps.local_rank) for size in made[:, 2]], bool)
    is_known, num_lost = is_in(own), 0
    for every, spans in ((1, made[~is_thinned]), (LONGEST_GAP, made[is_thinned])):
        is_lost = is_in(spans) & ~is_known
        num_lost += int((lasts // every - (firsts - 1) // every)[is_lost].sum())
        is_known |= is_lost
    return num_lost


def number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "1, 3 to 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def _read_attempts(folder: Path, problems: list[str]) -> tuple[float, ...]:
    """Return when each attempt of the run started, in Unix seconds."""
    return tuple(
        float(line["started_at_unix_seconds"])
        for line in _read_json_lines(folder / "attempts.jsonl", problems)
        if isinstance(line.get("started_at_unix_seconds"), int | float)
    )


def _read_small_files(
    folder: Path, problems: list[str]
) -> tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...], bool | None]:
    """Return settings, decisions, and whether targets are listed."""
    settings = _read_json(folder / "settings.json", dict, problems, is_expected=True)
    decisions = _read_json_lines(folder / "decisions.jsonl", problems)
    if len(decisions) > MAX_DECISIONS:
        problems.append(f"decisions.jsonl: only the last {MAX_DECISIONS} decisions are read")
    targets = _read_json(folder / "targets.json", list, problems)
    return (
        settings or {},
        tuple(decisions[-MAX_DECISIONS:]),
        None if targets is None else bool(targets),
    )


def _read_json(
    path: Path, expected: Callable[[], Any], problems: list[str], *, is_expected: bool = False
) -> Any:
    """Return the content of a file; None if it is missing or damaged."""
    try:
        content = orjson.loads(_content(path))
    except FileNotFoundError:
        if is_expected:
            problems.append(f"{path.name} is missing")
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return None
    except ValueError:
        problems.append(f"{path.name} is damaged or cut")
        return None
    if type(content) is not expected:
        problems.append(f"{path.name} is damaged: not a {expected}")
        return None
    return content


def _content(path: Path) -> bytes:
    regular_file_status(path)  # a FIFO would wait for the other end
    return path.read_bytes()


def _read_json_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the objects in a file of lines; a damaged line is left out."""
    try:
        lines = _content(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror or error}")
        return []
    objects = []
    num_bad = 0
    for line in lines:
        try:
            value = orjson.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        else:
            num_bad += bool(line)
    if num_bad:
        problems.append(f"{path.name}: {num_bad} damaged line(s) are left out")
    return objects


# Where the reports of each kind are, below the run folder.
_REPORTS: Mapping[ReportKind, tuple[str, ...]] = {
    "out_of_memory": ("oom/rank-*.txt",),
    "leak": ("memory/leak-rank-*.txt",),
    "hang": ("hang-rank-*.txt",),
    "exit": ("exits/rank-*.txt",),
}


def _read_reports(folder: Path, problems: list[str]) -> Iterator[ReportFile]:
    for kind, patterns in _REPORTS.items():
        paths = sorted(
            (path for pattern in patterns for path in folder.glob(pattern) if os.path.isfile(path)),
            key=_age_order,
        )
        if len(paths) > MAX_REPORTS_PER_KIND:
            problems.append(f"only the last {MAX_REPORTS_PER_KIND} of {len(paths)} {kind} reports")
        for path in paths[-MAX_REPORTS_PER_KIND:]:
            try:
                with open(path, "rb") as file:
                    text = file.read(MAX_REPORT_BYTES).decode(errors="replace")
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
                    end = file.read(_END_BYTES).decode(errors="replace")
            except OSError as error:
                name = path.relative_to(folder)
                problems.append(f"{name} cannot be read: {error.strerror or error}")
                continue
            rank = re.search(r"rank-(\d+)", path.name)
            yield ReportFile(
                kind=kind,
                path=path,
                rank=int(rank[1]) if rank else None,
                headline=printable(text.split("\n", 1)[0]),
                text=text,
                has_resumed=f"\n{RESUMED}" in end,
            )


def _unclosed(folder: Path) -> list[int]:
    names = (
        re.fullmatch(r"rank-(\d+)", path.name.removesuffix(SUFFIX))
        for path in folder.glob(f"rank-*{SUFFIX}")
    )
    return sorted(int(name[1]) for name in names if name)


def _unreported_exits(
    folder: Path, ranks: Mapping[int, RankSteps], problems: list[str]
) -> Iterator[ReportFile]:
    """Yield the noted exits that no later start on the host has reported."""
    notes = unreported_notes(folder)
    for path in sorted(notes, key=_age_order)[-MAX_REPORTS_PER_KIND:]:
        rank = notes[path]
        note = _read_json(path, dict, problems)
        if not isinstance(note, dict) or not isinstance(note.get("text"), str):
            continue
        # A note stays if no start on its host follows. The job may have trained on for days on
        # other hosts, so the time of the note is that of the exit, unless the folder was copied.
        written_at = min(max(0.0, _modified_at(path)), MAX_UNIX_SECONDS)
        steps = ranks.get(rank)
        row = -1 if steps is None else int((steps.columns["ended_at"] <= written_at).sum()) - 1
        last = "before its first record"
        if steps is not None and row >= 0:
            last = f"after step {steps.columns['step'][row]}"
        headline = printable(f"rank {rank} {note['text']}, {last}")
        text = f"{headline}\n\nnoted: {utc_text(written_at)}\n"
        yield ReportFile(kind="exit", path=path, rank=rank, headline=headline, text=text)


def _modified_at(path: Path) -> float:
    """Return when a file was last written, in Unix seconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _age_order(path: Path) -> tuple[float, list[int], str]:
    """Order reports by their time, then by the numbers in their names."""
    return _modified_at(path), [int(number) for number in re.findall(r"\d+", path.name)], path.name
