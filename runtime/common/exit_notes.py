"""Notes on how processes of a run exited, for the report at the next start.

A process that ends itself without cleaning up, and a launcher that sees its ranks exit, write one
to `exits/` in the run folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .liveness_file import ProcessMarker

FOLDER = "exits"
_SUFFIX = ".note.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitNote:
    """How one process exited.

    Attributes:
        text: What happened, such as "was the first to exit, by SIGKILL".
        may_be_oom_kill: Whether it was killed by SIGKILL, as the kernel's OOM killer does.
    """

    text: str
    may_be_oom_kill: bool


def write_exit_note(folder: Path, process: ProcessMarker, author: str, note: ExitNote) -> None:
    """Write a note to a run folder; each author writes one on a process.

    Raises:
        OSError: It cannot be written.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    path = folder / FOLDER / f"{_prefix(process)}{author}{_SUFFIX}"
    path.write_text(json.dumps(asdict(note)) + "\n")


def read_exit_notes(folder: Path, process: ProcessMarker) -> Sequence[ExitNote]:
    """Return the readable notes on a process, by author."""
    notes = []
    for path in sorted((folder / FOLDER).glob(f"{_prefix(process)}*{_SUFFIX}")):
        try:
            notes.append(ExitNote(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # incomplete, or of another version
            continue
    return notes


def _prefix(process: ProcessMarker) -> str:
    """Return the first part of the names of a process's notes; a later one may get its id."""
    return f"rank-{process.rank}-{process.pid}-{process.start_ticks}-"
