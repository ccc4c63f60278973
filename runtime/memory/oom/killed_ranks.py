"""Finds ranks of this host that exited uncleanly in an earlier run, and reports the likely cause.

The search takes place at the next start. A rank that exited uncleanly has left its liveness file
and its step log. Several ranks may search at the same time. The rank that moves the liveness file
away writes the report.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

from ....metrics.thresholds import OOM_RISK_HIGH
from ...common.exit_notes import FOLDER, REPORTED_SUFFIX, ExitNote, read_exit_notes
from ...common.format_numbers import format_bytes
from ...common.liveness_file import (
    ROOT,
    SUFFIX,
    OomKillCounts,
    ProcessMarker,
    boot_id,
    count_oom_kills_in,
    has_exited,
    pid_namespace,
    read_marker,
)
from ...common.log_tail import last_lines
from ...common.report_files import create_first_free, utc_text
from ..forecast.peak_readings import Shape
from .error_report import format_percent, format_shapes
from .kernel_log import (
    CLOCK_ERROR_SECONDS,
    MACHINE_PID_NAMESPACE,
    KernelLog,
    OomKill,
    read_kernel_log,
)

logger = logging.getLogger(__name__)

# Only this many of the newest runs are searched. The search takes 0.1 ms per run.
MAX_RUNS = 100
# The ranks of one launch all start within this time.
LAUNCH_SECONDS = 600.0
# If the last peak was above this share of the limit, the next step has likely exceeded the limit.
NEAR_LIMIT_RATIO = 0.9
# Below this share of the limit, a kill elsewhere on the host says nothing about the rank. Readings
# above it must be in the step log soon.
FAR_FROM_LIMIT_RATIO = 0.5
# A rank dies within this time, or within some of its steps, after its last step record.
LAST_SIGN_SECONDS = 60.0
LAST_SIGN_STEPS = 5
# Maximum number of step log records in a report.
MAX_RECORDS = 20
# Bytes that are first read from the end of the step log. They hold a few hundred lines: a line is
# about 1 KiB long, and longer with many devices or collectives.
_TAIL_BYTES = 256 * 1024
# Steps recovered from a ring have no reading of the memory. This is more than a ring of them.
_MAX_TAIL_BYTES = 4 * 2**20


class ExitCause(Enum):
    """The reason why a process exited. The value is the text in reports."""

    OOM_KILLER = "was killed by the kernel's OOM killer"
    PROBABLY_OOM_KILLER = "was probably killed by the kernel's OOM killer"
    UNKNOWN = "exited uncleanly; whether it ran out of memory is unknown"
    OTHERWISE = (
        "exited uncleanly, not by the kernel's OOM killer: by a signal such as SIGKILL or "
        "SIGTERM, by a crash, or by os._exit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFinding:
    """The likely cause of an exit, and the evidence for this cause."""

    cause: ExitCause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRecord:
    """The host memory in one record of the step log. Values that are not recorded are None."""

    step: int
    ended_at_unix_seconds: float
    in_use_bytes: float | None
    peak_bytes: float | None
    limit_bytes: float | None
    risk_ratio: float | None
    shapes: tuple[Shape, ...]

    @property
    def limit_ratio(self) -> float | None:
        """The peak divided by the limit."""
        peak = self.in_use_bytes if self.peak_bytes is None else self.peak_bytes
        return _limit_ratio(peak, self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledRank:
    """A rank that exited uncleanly.

    Attributes:
        folder: The run folder of the rank.
        process: The process.
        finding: The likely cause of the exit.
        notes: Notes on the exit, written by the process itself or by its launcher.
        records: The last step records of the rank, oldest first.
        report: Path of the report. None if the folder cannot be written.
    """

    folder: Path
    process: ProcessMarker
    finding: ExitFinding
    notes: Sequence[ExitNote]
    records: tuple[LastRecord, ...]
    report: Path | None

    @property
    def by_oom_killer(self) -> bool:
        """Whether the kernel's OOM killer certainly or probably killed the process."""
        return self.finding.cause in (ExitCause.OOM_KILLER, ExitCause.PROBABLY_OOM_KILLER)


def is_near_host_limit(states: Mapping[str, float]) -> bool:
    """Return whether the explanation of a kill depends on these readings of the host's memory.

    Args:
        states: Bytes by state, as in a record of the step log.
    """
    peak = states.get("peak_allocated", states.get("allocated"))
    ratio = _limit_ratio(peak, states.get("limit"))
    return ratio is not None and ratio >= FAR_FROM_LIMIT_RATIO


def _limit_ratio(peak_bytes: float | None, limit_bytes: float | None) -> float | None:
    if peak_bytes is None or not limit_bytes or not math.isfinite(limit_bytes):
        return None
    return peak_bytes / limit_bytes


def detect_killed_ranks(
    runs: Path, host: str, *, before_unix_seconds: float = math.inf, root: Path = ROOT
) -> list[KilledRank]:
    """Find the ranks that exited uncleanly and were not reported yet. Report and log them.

    Call this function before the current process writes its own liveness file. Do not call it on
    the training thread, because it reads and writes files. It does not raise disk errors.

    Args:
        runs: The folder that contains all run folders.
        host: The name of this machine. Each user of a host reports their own ranks only.
        before_unix_seconds: When the current process began to monitor. A restarted rank appends to
            the step log of the rank that exited, so later records belong to the restarted rank.
        root: The root of the file system. Tests set another root.
    """
    killed_ranks = []
    for folder in _newest(runs):
        dead = [
            (path, process)
            for path, process in _markers(folder)
            if _is_dead(path, process, host, root)
        ]
        together = {process for _, process in dead}.union(_reported(folder))
        for path, process in dead:
            killed = _report(folder, path, process, together, before_unix_seconds, root)
            if killed is not None:
                killed_ranks.append(killed)
    return killed_ranks


def exit_headline(folder: Path, process: ProcessMarker, note: ExitNote, root: Path = ROOT) -> str:
    """Return one line on a process of this host that has just exited; the next start reports it.

    Args:
        folder: The run folder of the process.
        process: The process, from its liveness file.
        note: A note on the exit, for a run folder that has none, because it cannot be written.
        root: The root of the file system. Tests set another root.

    Raises:
        OSError: A file of the system or of the run folder cannot be read.

    Examples:
        >>> exit_headline(folder, process, note)
        'rank 1 was the first rank of this host to fail, by SIGSEGV, after step 30; last reading...'
    """
    records = read_last_records(
        folder, process.rank, process.started_at_unix_seconds, before_unix_seconds=math.inf
    )
    notes = read_exit_notes(folder, process) or [note]
    finding = _finding(process, records, notes, died_together=1, root=root)
    return _headline(process, finding, notes, records)


def classify_exit(
    process: ProcessMarker,
    *,
    same_boot: bool,
    now: OomKillCounts,
    died_together: int = 1,
    limit_ratio: float | None = None,
    risk_ratio: float | None = None,
    log: KernelLog | None = None,
    last_seen: tuple[float, float] | None = None,
) -> ExitFinding:
    """Classify an exit by the kernel's counters and log, or else by the last readings.

    A kill that the kernel counts on the whole host is evidence only together with a sign that this
    rank was killed: its process id, its cgroup or the time in the kernel's log, or readings near
    the limit.

    Args:
        process: The process, with the values that the counters had at its start.
        same_boot: Whether the machine has run without a reboot since the process started. A reboot
            resets the counters to 0.
        now: The current counters of the same cgroup.
        died_together: Number of ranks of this run and cgroup that exited uncleanly, including this
            rank. If one rank exits, its launcher kills the remaining ranks.
        limit_ratio: The last peak divided by the limit.
        risk_ratio: The last predicted risk of running out of host memory.
        log: The kernel's log, if it can be read.
        last_seen: The earliest and the latest time at which the process may have exited, by its
            last step records, in Unix seconds. None without records.
    """
    then = process.kills
    if not same_boot:
        prefix = "the machine has rebooted since, or this host name is now another machine's"
        return _by_readings(prefix, limit_ratio, risk_ratio)
    cgroup, host = _increase(then.cgroup, now.cgroup), _increase(then.host, now.host)
    is_counted = cgroup is not None and then.cgroup_inode == now.cgroup_inode
    if is_counted and cgroup is not None and (cgroup == 0 or cgroup >= died_together):
        return _by_cgroup(cgroup, host)
    if host == 0:
        reason = "it has killed no process on this host since"
        return ExitFinding(cause=ExitCause.OTHERWISE, reason=reason)
    by_log = None if log is None else _by_log(process, log, last_seen)
    if by_log is not None:
        return by_log
    if is_counted:
        reason = (
            f"it has killed {cgroup} process(es) of this rank's memory cgroup since, and "
            f"{died_together} ranks exited together: this one or another"
        )
        return _unless_far(reason, limit_ratio)
    if host:
        prefix = f"it has killed {host} process(es) on this host since, in an unknown cgroup"
        return _by_readings(prefix, limit_ratio, risk_ratio)
    return _by_readings("the kernel has no counters", limit_ratio, risk_ratio)


def _by_cgroup(kills: int, on_host: int | None) -> ExitFinding:
    if kills:
        reason = f"it has killed {kills} process(es) of this rank's memory cgroup since"
        return ExitFinding(cause=ExitCause.OOM_KILLER, reason=reason)
    elsewhere = f", but {on_host} elsewhere on this host" if on_host else ""
    reason = f"it has killed no process in this rank's memory cgroup since{elsewhere}"
    return ExitFinding(cause=ExitCause.OTHERWISE, reason=reason)


def _unless_far(reason: str, limit_ratio: float | None) -> ExitFinding:
    if limit_ratio is not None and limit_ratio < FAR_FROM_LIMIT_RATIO:
        reason = f"{reason}; this one's last peak was only {100 * limit_ratio:.0f} % of the limit"
        return ExitFinding(cause=ExitCause.UNKNOWN, reason=reason)
    return ExitFinding(cause=ExitCause.PROBABLY_OOM_KILLER, reason=reason)


def _by_log(
    process: ProcessMarker, log: KernelLog, last_seen: tuple[float, float] | None
) -> ExitFinding | None:
    """Classify an exit by the kernel's log, or return None if the log does not decide."""
    since = process.started_at_unix_seconds - CLOCK_ERROR_SECONDS
    kills = [kill for kill in log.kills if kill.at_unix_seconds >= since]
    if process.pid_namespace == MACHINE_PID_NAMESPACE:
        for kill in kills:
            if kill.pid == process.pid:
                reason = f"the kernel's log names this process id, {_kill_text(kill)}"
                return ExitFinding(cause=ExitCause.OOM_KILLER, reason=reason)
        if log.since_unix_seconds <= since:
            reason = "the kernel's log names other processes since, but not this process id"
            return ExitFinding(cause=ExitCause.OTHERWISE, reason=reason)
    if last_seen is None:
        return None
    earliest, latest = last_seen[0] - CLOCK_ERROR_SECONDS, last_seen[1] + CLOCK_ERROR_SECONDS
    if log.since_unix_seconds > earliest:
        return None
    in_time = [kill for kill in kills if earliest <= kill.at_unix_seconds <= latest]
    if not in_time:
        reason = "the kernel's log has no kill at the time when this rank exited"
        return ExitFinding(cause=ExitCause.OTHERWISE, reason=reason)
    own = _cgroup_path(process)
    for kill in in_time:
        if own and kill.cgroup.endswith(own):
            reason = f"the kernel's log names a process of this rank's cgroup, {_kill_text(kill)}"
            return ExitFinding(cause=ExitCause.PROBABLY_OOM_KILLER, reason=reason)
    return None


def _kill_text(kill: OomKill) -> str:
    cgroup = f" in the memory cgroup {kill.cgroup}" if kill.cgroup else ""
    return f"killed at {utc_text(kill.at_unix_seconds)}{cgroup}"


def _cgroup_path(process: ProcessMarker) -> str:
    """Return the path of the rank's memory cgroup, or "" if it is the root of its container."""
    file = process.kills.cgroup_file
    if file is None:
        return ""
    folder = str(Path(file).parent)
    path = folder.partition("/sys/fs/cgroup")[2].removeprefix("/memory")
    return path if len(path) > 1 else ""


def _by_readings(prefix: str, limit_ratio: float | None, risk_ratio: float | None) -> ExitFinding:
    signs = []
    is_far = limit_ratio is not None and limit_ratio < FAR_FROM_LIMIT_RATIO
    if limit_ratio is not None and limit_ratio >= NEAR_LIMIT_RATIO:
        signs.append(f"its last peak was {100 * limit_ratio:.0f} % of the limit")
    if risk_ratio is not None and risk_ratio > OOM_RISK_HIGH and not is_far:
        signs.append(f"its last risk was {100 * risk_ratio:.0f} %")
    cause = ExitCause.PROBABLY_OOM_KILLER if signs else ExitCause.UNKNOWN
    return ExitFinding(cause=cause, reason=f"{prefix}; " + (" and ".join(signs) or "no sign of it"))


def _increase(then: int | None, now: int | None) -> int | None:
    return None if then is None or now is None or now < then else now - then


def _newest(runs: Path) -> list[Path]:
    try:
        folders = [entry for entry in os.scandir(runs) if entry.is_dir()]
        folders.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return []
    return [Path(entry.path) for entry in folders[:MAX_RUNS]]


def _markers(folder: Path) -> Iterator[tuple[Path, ProcessMarker]]:
    for path in sorted(folder.glob(f"rank-*{SUFFIX}")):
        process = read_marker(path)
        if process is not None:
            yield path, process


def workers_of_host(runs: Path, host: str) -> Mapping[tuple[int, int], tuple[Path, ProcessMarker]]:
    """Return the newest runs' liveness files of this user whose process ids are valid here.

    Returns:
        Run folder and marker of each process, by rank and process id. Of several markers with the
        same rank and process id, the last one is kept.
    """
    try:
        here = host, boot_id(), pid_namespace()
    except OSError:  # without this file, no process writes a liveness file
        return {}
    processes = [(folder, process) for folder in _newest(runs) for _, process in _markers(folder)]
    processes.sort(key=lambda item: item[1].started_at_unix_seconds)
    return {
        (process.rank, process.pid): (folder, process)
        for folder, process in processes
        if (process.host, process.boot_id, process.pid_namespace) == here
    }


def _reported(folder: Path) -> list[ProcessMarker]:
    """Return the processes of a run folder that any rank has already reported."""
    markers = map(read_marker, (folder / FOLDER).glob(f"rank-*{REPORTED_SUFFIX}"))
    return [process for process in markers if process is not None]


def _is_dead(path: Path, process: ProcessMarker, host: str, root: Path) -> bool:
    try:
        return process.host == host and has_exited(process, path, root)
    except OSError:  # another rank has moved the file, or /proc cannot be read
        return False


def _report(
    folder: Path,
    path: Path,
    process: ProcessMarker,
    together: Set[ProcessMarker],
    before_unix_seconds: float,
    root: Path,
) -> KilledRank | None:
    """Report one rank, or return None if another rank has moved the liveness file away."""
    records = read_last_records(
        folder, process.rank, process.started_at_unix_seconds, before_unix_seconds
    )
    notes = read_exit_notes(folder, process)
    try:
        if not _claim(folder, path, process):
            return None
        died_together = sum(_is_same_launch(process, other) for other in together)
        finding = _finding(process, records, notes, died_together=died_together, root=root)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            logger.info(
                "%s cannot be moved, so it is reported again at each start: %s", path, error
            )
        return None
    is_oom = finding.cause in (ExitCause.OOM_KILLER, ExitCause.PROBABLY_OOM_KILLER)
    text = _report_text(process, finding, notes, records)
    report = _write(folder / ("oom" if is_oom else FOLDER), process.rank, text)
    # Most unclean exits are caused by signals from launchers. They need no warning.
    level = logging.INFO if finding.cause is ExitCause.OTHERWISE else logging.WARNING
    where = f"report: {report}" if report else "no report could be written"
    headline = _headline(process, finding, notes, records)
    logger.log(level, "run %s: %s (%s)", folder.name, headline, where)
    return KilledRank(
        folder=folder,
        process=process,
        finding=finding,
        notes=notes,
        records=tuple(records),
        report=report,
    )


def _claim(folder: Path, path: Path, process: ProcessMarker) -> bool:
    """Move the liveness file of a process away; return whether this rank moved it.

    The rank's next process may have written its own file at this path, after it had reported its
    predecessor. That file is put back.

    Raises:
        FileNotFoundError: Another rank has moved the file.
        OSError: The file cannot be moved.
    """
    name = f"rank-{process.rank}-{process.pid}-{process.start_ticks}{REPORTED_SUFFIX}"
    (folder / FOLDER).mkdir(exist_ok=True)
    moved = folder / FOLDER / f"{name}.{os.getpid()}"
    path.rename(moved)
    if read_marker(moved) != process:
        moved.rename(path)
        return False
    moved.rename(folder / FOLDER / name)
    return True


def _finding(
    process: ProcessMarker,
    records: Sequence[LastRecord],
    notes: Sequence[ExitNote],
    *,
    died_together: int,
    root: Path,
) -> ExitFinding:
    """Return the likely cause of an exit, by all that is known.

    Raises:
        OSError: The boot id of this host cannot be read.
    """
    if notes and not any(note.may_be_oom_kill for note in notes):
        reason = "it is known how the process ended"
        return ExitFinding(cause=ExitCause.OTHERWISE, reason=reason)
    return classify_exit(
        process,
        same_boot=process.boot_id == boot_id(root),
        now=count_oom_kills_in(process.kills.cgroup_file, root),
        died_together=died_together,
        limit_ratio=_latest(records, "limit_ratio"),
        risk_ratio=_latest(records, "risk_ratio"),
        log=read_kernel_log(root),
        last_seen=_last_seen(records),
    )


def _last_seen(records: Sequence[LastRecord]) -> tuple[float, float] | None:
    """Return the times between which the rank exited, by the pace of its last steps."""
    if not records:
        return None
    # Without an older record that was added for its reading of the memory.
    ends = [record.ended_at_unix_seconds for record in records[-MAX_RECORDS:]]
    longest = max((later - earlier for earlier, later in pairwise(ends)), default=0.0)
    return ends[-1], ends[-1] + max(LAST_SIGN_SECONDS, LAST_SIGN_STEPS * longest)


def _is_same_launch(process: ProcessMarker, other: ProcessMarker) -> bool:
    apart = abs(process.started_at_unix_seconds - other.started_at_unix_seconds)
    own = process.boot_id, process.kills.cgroup_inode
    return own == (other.boot_id, other.kills.cgroup_inode) and apart < LAUNCH_SECONDS


def _write(folder: Path, rank: int, text: str) -> Path | None:
    endings = chain([""], (f"-{number}" for number in count(2)))
    try:
        folder.mkdir(exist_ok=True)
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


# The report.

_OUT_OF_MEMORY_ADVICE = (
    "Reduce host memory: fewer or leaner data loader workers, less offloading to cpu, a smaller "
    "micro-batch; or give the job more memory.",
    "The kernel's log lists the memory of every process at that time (dmesg, or journalctl -k).",
)
_ADVICE = {
    ExitCause.OOM_KILLER: _OUT_OF_MEMORY_ADVICE,
    ExitCause.PROBABLY_OOM_KILLER: (
        *_OUT_OF_MEMORY_ADVICE,
        "Check there whether it names this process id.",
    ),
    ExitCause.UNKNOWN: ("Check the logs of the machine and of the scheduler at that time.",),
    ExitCause.OTHERWISE: (
        "Check the launcher's and the scheduler's logs for a signal (time limit, preemption, "
        "another rank's exit: see the report of that rank). After SIGSEGV, SIGBUS or SIGABRT, look "
        "for a core dump.",
    ),
}


def _headline(
    process: ProcessMarker,
    finding: ExitFinding,
    notes: Sequence[ExitNote],
    records: Sequence[LastRecord],
) -> str:
    """Return one line with the rank, the cause, the last step and the last memory reading."""
    is_noted = notes and finding.cause in (ExitCause.OTHERWISE, ExitCause.UNKNOWN)
    cause = notes[0].text if is_noted else finding.cause.value
    step = f"after step {records[-1].step}" if records else "before its first record"
    return f"rank {process.rank} {cause}, {step}{_last_memory(records)}"


def _report_text(
    process: ProcessMarker,
    finding: ExitFinding,
    notes: Sequence[ExitNote],
    records: Sequence[LastRecord],
) -> str:
    """Return the whole report. Its first line is the headline."""
    started = utc_text(process.started_at_unix_seconds)
    lines = [_headline(process, finding, notes, records), ""]
    lines += [f"rank {process.rank} on {process.host}, process {process.pid}, started {started}"]
    if records:
        lines += [f"last record: {utc_text(records[-1].ended_at_unix_seconds)}"]
    lines += [f"rank {process.rank} {note.text}" for note in notes]
    if not notes:
        lines += ["whether it was the first rank to exit is unknown: `zerowatch run` notes it"]
    lines += [f"the kernel's OOM killer: {finding.reason}", "", *_table(records), ""]
    lines += ["What to do next:"]
    lines += [f"  {n}. {line}" for n, line in enumerate(_ADVICE[finding.cause], 1)]
    return "\n".join(lines) + "\n"


def _last_memory(records: Sequence[LastRecord]) -> str:
    in_use, limit = _latest(records, "in_use_bytes"), _latest(records, "limit_bytes")
    if in_use is None:
        return ""
    risk = _latest(records, "risk_ratio")
    peak = _latest(records, "peak_bytes")
    parts = [f"{format_bytes(in_use)} in use"]
    parts += [f"peak {format_bytes(peak)}"] if peak else []
    parts += [f"limit {format_bytes(limit)}"] if limit else []
    parts += [] if risk is None else [f"risk {format_percent(risk, 1)}"]
    return f"; last reading: {', '.join(parts)}"


def _table(records: Sequence[LastRecord]) -> Iterator[str]:
    if not records:
        yield "Last records: none."
        return
    yield "Last records (host memory; not every step reads it):"
    row = "{:>9} {:>10} {:>10} {:>10} {:>9} {:>7}  {}".format
    yield row("step", "in use", "peak", "limit", "of limit", "risk", "micro-batches")
    for record in records:
        sizes = (record.in_use_bytes, record.peak_bytes, record.limit_bytes)
        yield row(
            record.step,
            *("-" if size is None else format_bytes(size) for size in sizes),
            "-" if record.limit_ratio is None else format_percent(record.limit_ratio, 1),
            "-" if record.risk_ratio is None else format_percent(record.risk_ratio, 1),
            format_shapes(record.shapes),
        )


# The step log.


def read_last_records(
    folder: Path,
    rank: int,
    since_unix_seconds: float,
    before_unix_seconds: float = math.inf,
) -> list[LastRecord]:
    """Return the last records of a rank within a period of its step log.

    If none of them has a reading of the memory, the last one that has comes first: steps that are
    recovered from a ring have none.
    """
    records: list[Mapping[str, Any]] = []
    for name in (f"rank-{rank}.jsonl", f"rank-{rank}.1.jsonl"):  # the log may have just rotated
        if not _are_enough(records):
            records = [
                *_records_between(folder / name, since_unix_seconds, before_unix_seconds),
                *records,
            ]
    last = [_last_record(record) for record in records[-MAX_RECORDS:]]
    if all(record.in_use_bytes is None for record in last):
        earlier = map(_last_record, reversed(records[:-MAX_RECORDS]))
        last[:0] = [record for record in earlier if record.in_use_bytes is not None][:1]
    return last


def _records_between(
    path: Path, since_unix_seconds: float, before_unix_seconds: float
) -> list[Mapping[str, Any]]:
    """Return the last records of a period. A restarted rank may have added many later ones."""
    num_bytes = _TAIL_BYTES
    while True:
        try:
            lines, is_whole = last_lines(path, num_bytes)
        except OSError:
            return []
        records = list(_records(lines))
        of_period = [
            record
            for record in records
            if since_unix_seconds <= _ended_at(record) < before_unix_seconds
        ]
        has_earlier = bool(records) and _ended_at(records[0]) < since_unix_seconds
        if is_whole or has_earlier or _are_enough(of_period) or num_bytes >= _MAX_TAIL_BYTES:
            return of_period
        num_bytes *= 4


def _are_enough(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are enough records, and one with a reading of the memory among them."""
    return len(records) >= MAX_RECORDS and any(map(_host_memory, reversed(records)))


def _latest(records: Sequence[LastRecord], field: str) -> Any:
    """Return the last value of a field that is not None: some steps do not read memory."""
    values = (getattr(record, field) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def _records(lines: Sequence[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the writer was killed within this line
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


def _ended_at(record: Mapping[str, Any]) -> float:
    return float(record.get("ended_at_unix_seconds") or 0.0)


def _host_memory(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a step's reading of the host's memory; empty if the step has none."""
    return (record.get("memory_bytes") or {}).get("cpu") or {}


def _last_record(record: Mapping[str, Any]) -> LastRecord:
    host = _host_memory(record)
    return LastRecord(
        step=int(record["step"]),
        ended_at_unix_seconds=_ended_at(record),
        in_use_bytes=host.get("allocated"),
        peak_bytes=host.get("peak_allocated"),
        limit_bytes=host.get("limit"),
        risk_ratio=(record.get("oom_risk_ratio") or {}).get("cpu"),
        shapes=tuple(Shape(*each) for each in record.get("micro_batch_shapes") or ()),
    )
