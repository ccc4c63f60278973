"""Merges the targets of all runs in a folder, for file_sd and http_sd of Prometheus.

    python -m zerowatch.dashboards.stack.run_targets --runs runs --to targets.json

Each run folder contains a targets.json. A run that ends normally empties it; one that was killed
does not, and is dropped when its logs have not grown for some time. The next run usually serves on
the same ports, so two files may name the same address: then the newest file determines the labels.
When the newer run ends, the address returns to the older file only if that run is live, as it may
be on another host with the same loopback address. This is known of files that were read before.

The folder may be on a file system that a whole cluster writes to. A file is therefore read only if
it has changed, and what it contains is checked: a run may list ranks of its own name only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ...metrics.atomic_file import atomic_write
from ...metrics.file_lock import LOCK_FILE, is_locked_by_another

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
# Ranks end some seconds apart, and each is scraped once more at its end. An address is therefore
# listed for so long after rank 0 has withdrawn it: longer than serve.linger_seconds.
WITHDRAWN_SECONDS = 90.0
# A run that was killed never withdraws its targets. It is dropped if rank 0 has written nothing for
# so long. The alerts on a killed run do not need its targets.
FORGET_SECONDS = 24 * 3600.0
# The same for runs of this host. Rank 0 locks its run folder, so a dead run could be dropped at
# once. But a lock is invisible from another host if the network file system has none, and the clock
# of that host may differ by some minutes.
FORGET_UNLOCKED_SECONDS = 600.0
TARGETS_FILE = "targets.json"
MAX_FILE_BYTES = 8 * 2**20  # a target has some 200 bytes
MAX_ADDRESSES = 65536  # of one run; a file could hold a million
# What rank 0 of a live run writes: its metrics each 15 s, also while training hangs. Not the folder
# itself, because `zerowatch report` writes into that of a dead run.
_SIGNS_OF_LIFE = (TARGETS_FILE, "rank-0.jsonl", "metrics-0.jsonl")
# Everything else could overwrite labels of Prometheus, such as `job`, or the path of the scrape.
_LABELS = ("run", "node", "rank", "__param_run")
UNREADABLE = (
    "this user cannot read it; start the job with umask 022, or run `zerowatch targets` as a user "
    "or group that may read it"
)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")
Target = dict[str, Any]
Targets = list[Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Takeover:
    """What was known of a run when a newer one was last seen with its address.

    Attributes:
        seen_at: When that was, as Unix time.
        written_at: When rank 0 of the older run had last written, as Unix time.
    """

    seen_at: float
    written_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunFile:
    """The targets of one run, and what identifies the version of the file they are from.

    Attributes:
        version: Changes with the file.
        modified_at: Unix time of the last change, in seconds.
        targets: The targets by address.
        takeovers: The addresses that a newer run has had since.
    """

    version: tuple[int, int, int]
    modified_at: float
    targets: dict[str, Target]
    takeovers: dict[str, _Takeover] = field(default_factory=dict)


class TargetFiles:
    """The targets.json files in a folder of run folders.

    Args:
        runs: The folder of run folders.
        wall_clock: The Unix time, to which times of files are compared.
        forget_seconds: Drop a run if rank 0 has written nothing for so long.
        asks_locks: Keep a run whose folder is locked, even if rank 0 has written nothing. On a
            network file system this is a slow request for each dead run.
    """

    def __init__(
        self,
        runs: Path,
        wall_clock: Callable[[], float] = time.time,
        forget_seconds: float = FORGET_SECONDS,
        *,
        asks_locks: bool = False,
    ) -> None:
        self._runs = runs
        self._wall_clock = wall_clock
        self._forget_seconds = forget_seconds
        self._asks_locks = asks_locks
        self._files: dict[str, _RunFile] = {}
        self._refused: dict[str, str] = {}

    def read(self) -> Targets:
        """Return the targets of all runs, each address with the labels of the newest file.

        When the newer file withdraws an address, it returns to an older file if rank 0 of that run
        has written since, or holds the lock of its folder: the runs are on different hosts with the
        same loopback address. A dead run does not get it back. It does if this object has never
        seen the address in both files, such as after a restart of the service.

        A file that is missing, incomplete or refused is ignored. A refused one, or one that this
        user cannot read, is logged.

        Raises:
            OSError: The folder cannot be listed.
        """
        with os.scandir(self._runs) as entries:
            names = {entry.name for entry in entries if not entry.name.startswith(".")}
        self._files = {name: file for name in names if (file := self._read_run(name)) is not None}
        self._refused = {name: why for name, why in self._refused.items() if name in names}
        newest_first = sorted(
            self._files.items(), key=lambda item: (item[1].modified_at, item[0]), reverse=True
        )
        found: dict[str, Target] = {}
        for name, file in newest_first:
            if not file.targets:
                continue
            written_at = self._last_write(name)
            if self._is_forgotten(name, written_at):
                continue
            for address, target in file.targets.items():
                if address in found:
                    file.takeovers[address] = _Takeover(
                        seen_at=self._wall_clock(), written_at=written_at
                    )
                    continue
                takeover = file.takeovers.get(address)
                if takeover is None or self._returns(name, takeover, written_at):
                    file.takeovers.pop(address, None)
                    found[address] = target
        return [found[address] for address in sorted(found)]

    def _read_run(self, name: str) -> _RunFile | None:
        path = self._runs / name / TARGETS_FILE
        targets: dict[str, Target] = {}
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._files.get(name)
            if known is not None and known.version == version:
                return known
            checked = _checked(_content(path, status), run=name)
            targets = {target["targets"][0]: target for target in checked}
        except PermissionError:
            self._log_refused(name, UNREADABLE)
            return None
        except OSError:  # no run folder, or one without targets yet
            return None
        except ValueError as error:
            self._log_refused(name, str(error))
        return _RunFile(version=version, modified_at=status.st_mtime, targets=targets)

    def _returns(self, name: str, takeover: _Takeover, written_at: float) -> bool:
        """Return whether an address returns to a run, after the last scrape of the newer run."""
        if self._wall_clock() - takeover.seen_at < WITHDRAWN_SECONDS:
            return False
        return written_at > takeover.written_at or self._is_locked(name)

    def _last_write(self, name: str) -> float:
        return max(_modified_at(self._runs / name / each) for each in _SIGNS_OF_LIFE)

    def _is_forgotten(self, name: str, written_at: float) -> bool:
        is_silent = self._wall_clock() - written_at > self._forget_seconds
        return is_silent and not self._is_locked(name)

    def _is_locked(self, name: str) -> bool:
        return self._asks_locks and is_locked_by_another(self._runs / name / LOCK_FILE)

    def _log_refused(self, name: str, why: str) -> None:
        if self._refused.get(name) != why:
            self._refused[name] = why
            logger.warning("%s is ignored: %s", self._runs / name / TARGETS_FILE, why)


def files_of_this_host(runs: Path) -> TargetFiles:
    """Return the files of runs that are, with few exceptions, on this host.

    A killed run is dropped within minutes. Otherwise a Prometheus that is started later would raise
    an alert on ranks that it has never reached.
    """
    return TargetFiles(runs, forget_seconds=FORGET_UNLOCKED_SECONDS, asks_locks=True)


def newest_targets(runs: Path) -> Targets:
    """Return the targets of this host's runs in file_sd format; none if there is no such folder.

    Args:
        runs: The folder of run folders.
    """
    try:
        return files_of_this_host(runs).read()
    except FileNotFoundError:
        return []


class RunTargets:
    """The targets of all runs, including targets that were withdrawn a moment ago.

    Args:
        files: The files of the runs.
        now: A monotonic clock, in seconds.
    """

    def __init__(self, files: TargetFiles, now: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._now = now
        self._listed: dict[str, tuple[float, Target]] = {}

    def read(self) -> Targets:
        """Return the targets as they are now.

        Raises:
            OSError: The folder of the runs cannot be listed.
        """
        now = self._now()
        self._listed |= {each["targets"][0]: (now, each) for each in self._files.read()}
        self._listed = {
            address: (at, target)
            for address, (at, target) in self._listed.items()
            if now - at < WITHDRAWN_SECONDS
        }
        return [self._listed[address][1] for address in sorted(self._listed)]


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _content(path: Path, status: os.stat_result) -> object:
    """Return the JSON in a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is refused.
    """
    if not stat.S_ISREG(status.st_mode):  # reading a FIFO would block
        raise ValueError("it is no regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(f"it has {status.st_size} bytes, more than {MAX_FILE_BYTES}")
    try:
        return json.loads(path.read_text())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:  # zerowatch replaces the file at once, but other programs may not
        raise ValueError("it is no complete JSON") from None


def _checked(content: object, *, run: str) -> Targets:
    """Return the targets of a run, one for each address, with the known labels only.

    Raises:
        ValueError: The content is not what a run of that name writes.
    """
    if not isinstance(content, list):
        raise ValueError("it is no list")
    targets = (target for group in content for target in _checked_group(group, run))
    checked = list(islice(targets, MAX_ADDRESSES + 1))
    if len(checked) > MAX_ADDRESSES:
        raise ValueError(f"it lists more than {MAX_ADDRESSES} addresses")
    return checked


def _checked_group(group: object, run: str) -> Iterator[Target]:
    if not isinstance(group, dict) or not {"targets", "labels"} <= group.keys():
        raise ValueError("an element has no `targets` and `labels`")
    addresses, labels = group["targets"], group["labels"]
    if not isinstance(addresses, list) or not isinstance(labels, dict):
        raise ValueError("`targets` is no list, or `labels` no object")
    known = {name: labels[name] for name in _LABELS if name in labels}
    if not all(isinstance(value, str) for value in known.values()):
        raise ValueError("a label is no text")
    _refuse_foreign_run(known, run)
    for address in addresses:
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r:.80} is no HOST:PORT")
        yield {"targets": [address], "labels": known}


def _refuse_foreign_run(labels: Mapping[str, str], run: str) -> None:
    """Raise an error if a run lists ranks under the name of another run."""
    for name in ("run", "__param_run"):
        if labels.get(name, run) != run:
            raise ValueError(f"its label {name} is {labels[name]!r:.100}, not the folder's name")


def write_if_changed(file: Path, targets: Targets) -> None:
    """Replace the file atomically if its content changes, so that Prometheus reads it whole."""
    text = json.dumps(targets, indent=2) + "\n"
    if file.is_file() and file.read_text() == text:
        return
    atomic_write(file, text)


def update_file(file: Path, targets: RunTargets, known: str = "") -> str:
    """Write the targets to the file, and return the reason why it cannot be written, or "".

    If the folder of the runs cannot be listed, such as before the first run, the file stays.

    Args:
        file: The file for file_sd of Prometheus.
        targets: The targets of all runs.
        known: The reason that the last call returned; it is not logged again.
    """
    try:
        found = targets.read()
    except OSError:
        return known
    try:
        write_if_changed(file, found)
    except OSError as error:
        why = error.strerror or str(error)
        if why != known:
            logger.warning(
                "%s cannot be written: %s; Prometheus keeps the targets that it has", file, why
            )
        return why
    return ""


def main() -> None:
    """Update the file every two seconds until the process is terminated."""
    parser = argparse.ArgumentParser(
        prog="zerowatch.dashboards.stack.run_targets", description=__doc__
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    targets = RunTargets(files_of_this_host(options.runs))
    failure = ""
    while True:
        failure = update_file(options.to, targets, failure)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
