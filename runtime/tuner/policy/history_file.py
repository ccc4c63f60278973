"""Keeps the search history on disk: one JSON file per job, which the job's next run reads."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ....metrics.atomic_file import atomic_write
from ....metrics.process_stat import state_and_start
from .policy_types import Configuration, Value

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_CONTEXTS = 16  # contexts that are kept of one job; the oldest contexts are dropped
# A trial's file of another host that was not renewed for this long is of a process that has ended,
# or is in a long step.
OTHER_HOST_SECONDS = 180.0
# Time between two renewals, which a step makes, and between two checks of the files of other
# processes: the file system may be slow.
RENEWAL_SECONDS = 30.0
# A crashed trial's file is kept for this long after its last renewal, so that not only the first
# run that reads it skips the trial.
KEPT_SECONDS = 3600.0
TRIAL_SUFFIX = ".trial.json"  # ends the name of the file with the changes that a process is trying

_run_numbers = itertools.count()

T = TypeVar("T")

# Knobs with values that are not to be tried.
ExcludedValues = frozenset[tuple[str, Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """Results of a job in one context.

    Attributes:
        configuration: The best configuration, with every knob. Empty if unknown.
        excluded: Knobs with values that did not help, or did harm.
    """

    configuration: Configuration
    excluded: ExcludedValues


def is_within(changes: Configuration, configuration: Configuration) -> bool:
    """Whether a configuration has all values of the changes."""
    return all(
        knob in configuration and configuration[knob] == value for knob, value in changes.items()
    )


def job_fingerprint(facts: Mapping[str, object]) -> str:
    """Return a short name of a job. Jobs with equal facts, such as shapes, have equal names."""
    text = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.sha256(text).hexdigest()[:16]


class HostProcesses:
    """Names the runs of a job, each by its host, process and number in the process.

    Attributes:
        own_name: Name of this run, valid as a part of a file's name. No other run has this name: a
            process id is used again, above all in containers, but not with the same start.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._host, self._root = socket.gethostname(), root
        start = ""
        with suppress(OSError):  # there is no /proc
            start = self._start_ticks(str(os.getpid()))
        self.own_name = f"{self._host}-{os.getpid()}.{start}.{next(_run_numbers)}"

    def has_ended(self, name: str) -> bool | None:
        """Whether another run has ended; None if unknown. An earlier run of this process has.

        A process on another host may be a job of the same sweep, or the container before a restart.
        """
        host, _, process = name.rpartition("-")
        if host != self._host:
            return None
        pid, _, start_and_number = process.partition(".")
        if pid == str(os.getpid()):
            return name != self.own_name
        try:
            return self._start_ticks(pid) != start_and_number.partition(".")[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # another user's process, whose start may be hidden
            return None

    def _start_ticks(self, pid: str) -> str:
        """Return when a process started, or "" if it has exited and its parent has not waited.

        Raises:
            OSError: There is no such process, or its start cannot be read.
        """
        state, start_ticks = state_and_start(pid, self._root)
        return "" if state in "ZX" else start_ticks


@dataclass(slots=True)
class _OtherTrial:
    """Trial of another process that may not have ended.

    Attributes:
        owner: Name of the run.
        changes: The changes on trial.
        first_at: Time of the last renewal when the file was first read.
        renewed_at: Time of the last renewal at the last check.
        is_crash: Whether it was likely at the last check that the process has ended.
    """

    owner: str
    changes: Configuration
    first_at: float
    renewed_at: float
    is_crash: bool = False


class HistoryFile:
    """Reads and writes the history of one job. Disk errors are not raised, but lose the history.

    Args:
        folder: Folder of the files; None for no history.
        key: Fingerprint of the job.
        processes: Names this run, and finds runs that have ended.
    """

    def __init__(
        self, folder: Path | None, key: str, processes: HostProcesses | None = None
    ) -> None:
        self._folder, self._key = folder, key
        self._processes = processes or HostProcesses()
        self._owner = self._processes.own_name
        self._renewal_due = 0.0
        self._is_unwritable = False
        self._on_trial: Configuration = {}
        self._others: dict[Path, _OtherTrial] = {}
        self._suspected: Sequence[Configuration] = ()
        self._check_due = 0.0

    def load(self) -> Mapping[str, HistoryEntry]:
        """Return the results by context; empty if the file is missing or damaged."""
        return self._read(f"{self._key}.json", _parse_entries) or {}

    def load_crashed_trials(self) -> Sequence[Configuration]:
        """Return the changes that were on trial when other runs crashed, and delete old files.

        The trials of processes that may not have ended are left to `suspected_trials`.
        """
        crashed: list[Configuration] = []
        paths = () if self._folder is None else self._folder.glob(f"{self._key}.*{TRIAL_SUFFIX}")
        for path in paths:
            owner = path.name[len(self._key) + 1 : -len(TRIAL_SUFFIX)]
            has_ended = self._processes.has_ended(owner)
            changes, renewed_at = self._read(path.name, _parse_trial), _renewed_at(path)
            is_old = renewed_at is not None and time.time() - renewed_at > KEPT_SECONDS
            if has_ended or (has_ended is None and is_old):
                if changes:
                    crashed.append(changes)
                if is_old or not changes:
                    with suppress(OSError):
                        path.unlink()
            elif changes and renewed_at is not None:
                self._others[path] = _OtherTrial(owner, changes, renewed_at, renewed_at)
        return crashed

    def suspected_trials(self) -> Sequence[Configuration]:
        """Return the changes on trial in other processes that have ended or may have.

        A process may have ended as long as it has not renewed its file, or if its last renewal is
        longer ago than OTHER_HOST_SECONDS. The files are checked every RENEWAL_SECONDS.
        """
        if self._others and time.monotonic() >= self._check_due:
            self._check_due = time.monotonic() + RENEWAL_SECONDS
            self._suspected = [
                trial.changes
                for path, trial in list(self._others.items())
                if self._is_suspected(path, trial)
            ]
        return self._suspected

    def save(self, context: str, entry: HistoryEntry) -> None:
        """Replace the results of a context."""
        entries = {name: each for name, each in self.load().items() if name != context}
        entries[context] = entry
        self._write(f"{self._key}.json", _text(dict(list(entries.items())[-MAX_CONTEXTS:])))

    def save_trial(self, changes: Configuration) -> None:
        """Record the changes that are on trial. Delete the record if there are no changes."""
        self._on_trial = changes
        if changes:
            self._write(self._trial_name, _json({"schema": SCHEMA_VERSION, "on_trial": changes}))
        elif self._folder is not None:
            with suppress(OSError):
                (self._folder / self._trial_name).unlink(missing_ok=True)

    def renew_trial(self) -> None:
        """Record that the trial goes on; see `OTHER_HOST_SECONDS`."""
        now = time.monotonic()
        if self._folder is not None and now >= self._renewal_due:
            self._renewal_due = now + RENEWAL_SECONDS
            try:
                os.utime(self._folder / self._trial_name)
            except OSError:  # it was deleted, or the file system does not set times
                self.save_trial(self._on_trial)

    def _is_suspected(self, path: Path, trial: _OtherTrial) -> bool:
        renewed_at = _renewed_at(path)
        if renewed_at is None:
            if trial.is_crash and time.time() - trial.renewed_at > KEPT_SECONDS:
                return True  # another run has deleted the old file
            del self._others[path]  # the process has ended the trial
            return False
        if renewed_at != trial.renewed_at:  # perhaps with another trial
            trial.renewed_at = renewed_at
            trial.changes = self._read(path.name, _parse_trial) or trial.changes
        has_ended = self._processes.has_ended(trial.owner)
        if has_ended is not None:
            trial.is_crash = has_ended
            return has_ended
        trial.is_crash = time.time() - renewed_at > OTHER_HOST_SECONDS
        return trial.is_crash or renewed_at == trial.first_at

    @property
    def _trial_name(self) -> str:
        return f"{self._key}.{self._owner}{TRIAL_SUFFIX}"

    def _write(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        path = self._folder / name
        try:
            atomic_write(path, text)
            self._is_unwritable = False
        except OSError as error:
            if not self._is_unwritable:
                logger.warning("cannot write the tuner's history %s: %s", path, error)
            self._is_unwritable = True

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """Return the parsed content of a file; None if it is missing or damaged."""
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            data: Any = orjson.loads(path.read_bytes())
            if data["schema"] != SCHEMA_VERSION:
                raise ValueError(f"schema {data['schema']!r} is not {SCHEMA_VERSION}")
            return parse(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            logger.warning("tuner history %s is ignored: %s: %s", path, kind, error)
            return None


def _renewed_at(path: Path) -> float | None:
    """Return when a file was written or last renewed; None if it was deleted."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _text(contexts: Mapping[str, HistoryEntry]) -> str:
    plain = {
        name: {"configuration": each.configuration, "excluded": sorted(each.excluded, key=repr)}
        for name, each in contexts.items()
    }
    return _json({"schema": SCHEMA_VERSION, "contexts": plain})


def _json(data: object) -> str:
    return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n"


def _parse_entries(data: Any) -> dict[str, HistoryEntry]:
    return {
        str(name): HistoryEntry(
            configuration=_configuration(entry["configuration"]),
            excluded=frozenset((str(knob), _value(each)) for knob, each in entry["excluded"]),
        )
        for name, entry in data["contexts"].items()
    }


def _parse_trial(data: Any) -> Configuration:
    return _configuration(data["on_trial"])


def _configuration(entry: Any) -> Configuration:
    return {str(knob): _value(each) for knob, each in entry.items()}


def _value(entry: Any) -> Value:
    if entry is None or isinstance(entry, bool | int | str):
        return entry
    raise TypeError(f"{entry!r} is no value of a knob")
