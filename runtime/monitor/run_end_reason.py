"""Names how monitoring of a rank ended, for the metric run_end_info and for the run's report."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from ...errors import PeerFailedError, PeerOutOfMemoryError, cut
from ..common.exit_notes import AFTER_FIRST, ERROR_AUTHOR, FAILED, ExitNote, write_exit_note
from ..common.liveness_file import current_process
from ..common.peer_failures import describe_error
from ..common.plain_text import printable
from ..memory.oom.oom_error import is_caused_by_oom
from ..trainer.run_end import is_communication_error


def end_reason(
    error: BaseException | None,
    *,
    failed: bool,
    interrupted: bool,
    is_oom: Callable[[BaseException], bool] = is_caused_by_oom,
) -> str:
    """Return one of `END_REASONS`, as far as the error shows it.

    Args:
        error: The error that ends the run; None if it is unknown.
        failed: Whether the run ends by an error other than Ctrl-C.
        interrupted: Whether Ctrl-C ends the run.
        is_oom: Returns whether memory ran out, by the error.
    """
    if interrupted:
        return "interrupted"
    if not failed:
        return "completed"
    if error is None:
        return "exception"
    if isinstance(error, PeerFailedError | PeerOutOfMemoryError) or is_communication_error(error):
        return "peer_failed"
    return "out_of_memory" if is_oom(error) else "exception"


def note_error(folder: Path, rank: int, error: BaseException, reason: str) -> None:
    """Write a note on the error that ends this rank, for the report of the run.

    An out-of-memory error has a report of its own, and an error of a collective only says that
    another rank has left.

    Args:
        folder: The run folder.
        rank: This rank.
        error: The error.
        reason: Its reason by `end_reason`.

    Raises:
        OSError: The note cannot be written.
    """
    if isinstance(error, PeerFailedError):
        what = f"{error.error_type}: {error.error_text}".removesuffix(": ")
        text = f"ended {AFTER_FIRST}{error.rank} had failed in {error.place} with {what}"
    elif reason == "exception":
        text = FAILED + ": ".join(filter(None, describe_error(error)))
    else:
        return
    process = current_process(rank, socket.gethostname())
    if process is not None:
        note = ExitNote(text=cut(printable(text)), may_be_oom_kill=False)
        write_exit_note(folder, process, ERROR_AUTHOR, note)
