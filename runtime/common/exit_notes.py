"""Writes and reads notes on how processes of a run exited. The next start reports them.

A process that ends itself without cleaning up writes a note to `exits/` in the run folder. A
launcher writes a note for each of its ranks that exits. The next start on the host moves the
liveness file of the process there and writes a report. Until then, the notes are all that the
folder shows.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from ...metrics.atomic_file import atomic_write
from .liveness_file import ProcessMarker
from .own_files import read_own_file

FOLDER = "exits"
# A liveness file that was reported is moved into the folder. Its new name has this ending.
REPORTED_SUFFIX = ".life.json"
# How the first rank of a host to fail, and those that exited because of it, are described.
FIRST_TO_FAIL = "was the first rank of this host to fail"
AFTER_FIRST = "after rank "
# How a rank is described whose own error ended it.
FAILED = "failed with "
ERROR_AUTHOR = "error"  # of the notes on errors
_SUFFIX = ".note.json"
_NAME = re.compile(r"(rank-(\d+)-\d+-\d+)-.+\.note\.json")


def how_exited(code: int) -> str:
    """Describe an exit code of `subprocess`: "with code 1", or "by SIGKILL"."""
    if code >= 0:
        return f"with code {code}"
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    return f"by {names.get(-code, f'signal {-code}')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitNote:
    """How one process exited.

    Attributes:
        text: What happened, such as "was the first rank of this host to fail, by SIGKILL".
        may_be_oom_kill: Whether SIGKILL ended the process. The kernel's OOM killer sends SIGKILL.
    """

    text: str
    may_be_oom_kill: bool


def write_exit_note(folder: Path, process: ProcessMarker, author: str, note: ExitNote) -> None:
    """Write a note to a run folder. Each author writes one note per process.

    Raises:
        OSError: The note cannot be written.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    path = folder / FOLDER / f"{_prefix(process)}{author}{_SUFFIX}"
    # The text of an error may hold anything.
    atomic_write(path, json.dumps(asdict(note)) + "\n", mode=0o600)


def read_exit_notes(folder: Path, process: ProcessMarker) -> Sequence[ExitNote]:
    """Return the readable notes of this user on a process, by author."""
    notes = []
    for path in sorted((folder / FOLDER).glob(f"{_prefix(process)}*{_SUFFIX}")):
        try:
            notes.append(ExitNote(**json.loads(read_own_file(path))))
        except (OSError, ValueError, TypeError, RecursionError):  # incomplete, or another version's
            continue
    return notes


def error_note(
    folders: Iterable[Path], rank: int, pid: int, since_unix_seconds: float
) -> str | None:
    """Return the text of the note on the error that ended a process; None without one.

    Notes that cannot be read, and those of other users, are skipped.

    Args:
        folders: The run folders of the process's job. Processes of other jobs in containers may
            have the same rank and id.
        rank: The rank of the process.
        pid: The id of the process, which an earlier process may have had.
        since_unix_seconds: Earlier notes are of such a process.
    """
    pattern = f"{FOLDER}/rank-{rank}-{pid}-*-{ERROR_AUTHOR}{_SUFFIX}"
    for path in chain.from_iterable(folder.glob(pattern) for folder in folders):
        try:
            if path.stat().st_mtime >= since_unix_seconds:
                return str(json.loads(read_own_file(path))["text"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return None


def unreported_notes(folder: Path) -> Mapping[Path, int]:
    """Return the rank of each process that no report covers, by the first note on the process."""
    first: dict[str, tuple[Path, int]] = {}
    for path in sorted((folder / FOLDER).glob(f"rank-*{_SUFFIX}")):
        match = _NAME.fullmatch(path.name)
        if match and not path.with_name(f"{match[1]}{REPORTED_SUFFIX}").exists():
            first.setdefault(match[1], (path, int(match[2])))
    return dict(first.values())


def _prefix(process: ProcessMarker) -> str:
    """Return the prefix of a process's notes. It is unique even if a process id is reused."""
    return f"rank-{process.rank}-{process.pid}-{process.start_ticks}-"
