"""Prints and notes which rank failed first, as the agent of torchrun in this process sees it.

The line is printed at once, before torchrun ends the other ranks. The next start reports the ranks
that exited uncleanly, and reads the notes. A run folder whose host is lost blocks its readers, so
it is read and written on a thread.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..common.exit_notes import (
    AFTER_FIRST,
    FIRST_TO_FAIL,
    ExitNote,
    error_note,
    how_exited,
    write_exit_note,
)
from ..common.fail_open import FailOpen
from ..common.format_numbers import format_ranks
from ..common.launcher_link import RunFolderReceiver
from ..common.plain_text import write_line_if_open
from ..memory.oom.killed_ranks import exit_headline, workers_of_host
from ..monitor.step_ring import recover

T = TypeVar("T")

# The launcher waits for a run folder for this time; a busy disk takes less.
NOTES_SECONDS = 10.0
# A monitoring process (`process.separate`) completes the log of a killed rank within this time.
MONITORING_SECONDS = 3.0
# A rank exits within this time after it has noted its error.
ERROR_SECONDS = 60.0


@contextmanager
def record_worker_exits(receiver: RunFolderReceiver) -> Iterator[None]:
    """Note and print the exits of this process's workers while the context is open.

    Each attempt prints the rank that failed first, and the ranks that had ended before.

    Args:
        receiver: Receives the run folders.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    original, stop = LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers
    # A failure is logged, and the next attempt is noted again.
    note = FailOpen().wrap("exit notes", write_notes, is_kept=True)

    def monitor(agent: Any, worker_group: Any) -> Any:
        running = running_local_ranks(agent)
        result = original(agent, worker_group)
        if result.failures:
            pids, ended = worker_pids(worker_group), ended_ranks(worker_group, running)
            note(receiver.runs(), pids, result.failures, ended, receiver.named())
        return result

    def stopped(agent: Any, worker_group: Any) -> None:
        stop(agent, worker_group)
        if worker_group.state == WorkerState.HEALTHY:  # torch stops healthy ranks only then
            pids = worker_pids(worker_group)
            note_ended_workers(receiver.runs(), pids, "another node waited to join")

    LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]
    LocalElasticAgent._stop_workers = stopped  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalElasticAgent._monitor_workers = original  # type: ignore[method-assign]
        LocalElasticAgent._stop_workers = stop  # type: ignore[method-assign]


def worker_pids(worker_group: Any) -> Mapping[int, int]:
    """Return the process ids of the workers of torch's agent, by rank."""
    return {worker.global_rank: worker.id for worker in worker_group.workers}


def running_local_ranks(agent: Any) -> frozenset[int] | None:
    """Return the local ranks of torch's agent that had not ended when it looked last.

    None before the start, and if the agent starts no scripts.
    """
    running = getattr(getattr(agent, "_pcontext", None), "_running_local_ranks", None)
    return None if running is None else frozenset(running)


def ended_ranks(worker_group: Any, running: Collection[int] | None) -> list[int]:
    """Return the ranks that had exited with code 0 before torch's agent looked and found a failure.

    After a failure, torch ends the other ranks, which may then exit with code 0 too.

    Args:
        worker_group: The agent's workers.
        running: The local ranks that ran when it looked before. None if that is not known.
    """
    if running is None:
        return []
    return [
        worker.global_rank for worker in worker_group.workers if worker.local_rank not in running
    ]


def write_notes(
    runs: Sequence[Path],
    pids: Mapping[int, int],
    failures: Mapping[int, Any],
    ended: Sequence[int] = (),
    named: Sequence[Path] = (),
) -> None:
    """Write a note on each worker that has left its liveness file, and print who failed first.

    Args:
        runs: The folders of run folders.
        pids: Process ids of all workers by rank.
        failures: torch's ProcessFailure by rank, the first to exit first among those of a second.
        ended: The ranks that had exited with code 0 before.
        named: The run folders that the ranks have named. If there are none, each run folder is
            searched for the note on the error.
    """
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    noted = [
        _call_with_limit(each, partial(_write_exit_notes, each, pids, failures, first, named))
        or (None, None)
        for each in runs
    ]
    line = next((line for line, _ in noted if line is not None), None)
    error = next((error for _, error in noted if error is not None), None)
    if line is None:
        # Usually an exception has ended the rank: it has removed its file, and has printed its
        # traceback. Or it could not write its file.
        line = f"rank {first} {FIRST_TO_FAIL}, {how_exited(failures[first].exitcode)}"
        line += "; its own lines say why" if failures[first].exitcode >= 0 else ""
    write_line_if_open(sys.stderr, line)
    if ended:
        write_line_if_open(
            sys.stderr,
            f"before that, {format_ranks(ended)} had exited with code 0. Ranks that still train "
            "then fail. Did the script end there early, or with less data?",
        )
    if error is not None:
        write_line_if_open(
            sys.stderr,
            f"exits of ranks could not be noted in the run folder: {error}; the next start cannot "
            "report how they exited. Free space on its disk, or set run_log.folder to a writable "
            "folder",
        )


def note_ended_workers(runs: Sequence[Path], pids: Mapping[int, int], reason: str) -> None:
    """Write a note on each worker that the launcher ends. A failure is logged.

    Args:
        runs: The folders of run folders.
        pids: Process ids of the workers by rank.
        reason: Why the launcher ends them, such as "node host7 was lost".
    """
    text = f"was ended by the launcher, because {reason}"
    for each in runs:
        body = partial(_write_notes, each, pids, text)
        FailOpen().call("exit notes", _call_with_limit, each, body)


def recover_steps(runs: Sequence[Path]) -> None:
    """Append the last steps of this host's ranks that were killed to their logs.

    Args:
        runs: The folders of run folders.
    """
    for each in runs:
        _call_with_limit(each, partial(recover, each))


def is_answering(folder: Path) -> bool:
    """Return whether a run folder exists and can be read. One that hangs is printed.

    Args:
        folder: The run folder.
    """
    return bool(_call_with_limit(folder, folder.exists))


def _write_exit_notes(
    runs: Path,
    pids: Mapping[int, int],
    failures: Mapping[int, Any],
    first: int,
    named: Sequence[Path],
) -> tuple[str | None, OSError | None]:
    """Write the notes after the rank `first` had exited.

    Returns:
        The line on the first rank, None if it has left neither a liveness file nor a note on its
        error, and the error of the disk.
    """
    left = workers_of_host(runs, socket.gethostname())
    notes = {rank: _note_on(rank, first, failures) for rank in pids if (rank, pids[rank]) in left}
    error: OSError | None = None
    for rank, note in notes.items():
        try:
            write_exit_note(*left[rank, pids[rank]], "launcher", note)
        except OSError as unwritten:  # as on a full disk
            error = unwritten
    if first not in notes:
        own = [folder for folder in named if folder.parent == runs] if named else runs.glob("*")
        text = error_note(own, first, pids[first], time.time() - ERROR_SECONDS)
        how = how_exited(failures[first].exitcode)
        return (f"rank {first} {FIRST_TO_FAIL}, {how}: it {text}" if text else None), error
    folder, process = left[first, pids[first]]
    recover(folder, wait_seconds=MONITORING_SECONDS)  # the last second of steps
    return exit_headline(folder, process, notes[first]), error


def _write_notes(runs: Path, pids: Mapping[int, int], text: str) -> None:
    left = workers_of_host(runs, socket.gethostname())
    for worker in pids.items():
        if worker in left:
            note = ExitNote(text=text, may_be_oom_kill=False)
            write_exit_note(*left[worker], "launcher", note)


def _call_with_limit(folder: Path, body: Callable[[], T]) -> T | None:
    """Call a function that reads or writes in a folder, and wait for at most `NOTES_SECONDS`.

    Returns:
        Its result, or None if it has failed, which is logged, or has not returned yet, which is
        printed.
    """
    results: list[T | None] = []
    thread = threading.Thread(
        target=lambda: results.append(FailOpen().call("exit notes", body)),
        name="zerowatch-exit-notes",
        daemon=True,
    )
    thread.start()
    thread.join(NOTES_SECONDS)
    if results:
        return results[0]
    write_line_if_open(
        sys.stderr,
        f"{folder} (run_log.folder) has not answered for {NOTES_SECONDS:.0f} s. What the launcher "
        "reads or notes there is left out. Check the disk or the host that has this folder",
    )
    return None


def _note_on(rank: int, first: int, failures: Mapping[int, Any]) -> ExitNote:
    """Return the note on a rank's exit after the rank `first` had exited."""
    code = failures[rank].exitcode if rank in failures else -signal.SIGTERM
    how_first = how_exited(failures[first].exitcode)
    if rank == first:
        text = f"{FIRST_TO_FAIL}, {how_first}"
    elif code == -signal.SIGTERM:
        text = f"was ended by the launcher, {AFTER_FIRST}{first} had exited {how_first}"
    else:
        text = f"exited {how_exited(code)}, {AFTER_FIRST}{first} had exited {how_first}"
    return ExitNote(text=text, may_be_oom_kill=code == -signal.SIGKILL)
