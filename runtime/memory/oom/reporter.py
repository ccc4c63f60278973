"""Writes a report for each out-of-memory error that passes through the engine.

It runs on the thread that raised the error, once per error, and does not change the error.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from .evidence import OomContext, OomEvidence, collect_evidence, complete_device
from .parse_error import OomError, find_oom_error
from .report import MAX_REPORTS, headline, write_report

logger = logging.getLogger(__name__)

# A report takes 0.3 MiB, and Python allocates by 1 MiB. At this size the reserve is a separate
# mapping, which returns to the kernel at once.
RESERVE_BYTES = 4 * 2**20


class OomReporter:
    """Writes the reports of one rank. Used on the training thread.

    Lack of memory or disk space raises nothing; other failures are left to `FailOpen`.
    """

    def __init__(self, rank: int, context: OomContext) -> None:
        self._rank = rank
        self._context = context
        self._host = socket.gethostname()
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self._num_reports = 0
        # Addresses of the last error, of its traceback and of the traceback's innermost link.
        self._last = (0, 0, 0)

    def on_error(self, error: BaseException, *, is_end: bool = False) -> OomError | None:
        """Report an error if it is out of memory and was not reported on its way up.

        Args:
            error: The error that passes now.
            is_end: Whether the error ends the run; its traceback may have been shortened.

        Returns:
            The parsed error, to be counted; None for other errors and for one already reported.
        """
        found = find_oom_error(error)
        if found is None or self._is_known(found[0], error, is_end=is_end):
            return None
        oom = found[1]
        self._num_reports += 1
        if self._num_reports > MAX_REPORTS:  # the script catches them: a report costs it time
            return replace(oom, device=complete_device(oom, self._context.readings() or {}))
        self._reserve = None
        try:
            oom = self._report(oom, self._context)
        except MemoryError:
            oom = self._report_minimal(oom)
        self._restore_reserve()
        return oom

    def _is_known(self, error: BaseException, passing: BaseException, *, is_end: bool) -> bool:
        """Return whether an error was seen further down the stack.

        No reference to it is kept meanwhile, as it holds tensors. An error's traceback grows at its
        head on the way up. Another error may get the same address later, but its traceback does not
        contain the same links.
        """
        head = error.__traceback__
        known, known_head, known_end = self._last
        links = list(_links(head))
        self._last = (id(error), id(head), id(links[-1]) if links else 0)
        if known != id(error):
            return False
        if is_end:
            return known_end == self._last[2]
        inner = links[1:] if passing is error else links
        return any(id(link) == known_head for link in inner)

    def _report_minimal(self, error: OomError) -> OomError:
        """Report only facts that need no memory; the planner's tables, for one, may not fit."""
        try:
            return self._report(error, _MinimalContext(self._context))
        except MemoryError:
            logger.error("out of memory: %s (too little is left for a report)", error.message)
            return error

    def _report(self, error: OomError, context: OomContext) -> OomError:
        """Write and log a report; return the error with its complete device."""
        evidence = collect_evidence(self._rank, self._host, error, context)
        path, reason = None, "no run folder is written"
        folder = self._context.folder()
        if folder is not None:
            path, reason = self._write(folder, evidence)
        where = f"report: {path}" if path is not None else f"no report: {reason}"
        logger.error("%s (%s)", headline(evidence), where)
        return replace(error, device=evidence.device)

    def _write(self, folder: Path, evidence: OomEvidence) -> tuple[Path | None, str]:
        try:
            path = write_report(folder, evidence, self._context)
        except OSError as error:
            return None, f"it cannot be written: {error}"
        return path, f"this rank has written {MAX_REPORTS} already"

    def _restore_reserve(self) -> None:
        try:
            self._reserve = bytearray(RESERVE_BYTES)
        except MemoryError:  # the next report has none
            self._reserve = None


class _MinimalContext(OomContext):
    """The facts of another context that need no memory."""

    def __init__(self, context: OomContext) -> None:
        self._context = context

    def folder(self) -> Path | None:
        return self._context.folder()

    def step(self) -> int | None:
        return self._context.step()

    def phase(self) -> str | None:
        return self._context.phase()


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
