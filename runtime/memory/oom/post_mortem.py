"""Looks at errors that pass through the engine; writes the report of those that are out-of-memory.

All of it happens on the thread that raised, once per error, and leaves the error alone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from .collect_evidence import collect_evidence, device_of
from .evidence import Evidence, OomContext
from .parse_error import OomError, parse_oom_error
from .report import MAX_REPORTS, headline, write_report

logger = logging.getLogger(__name__)

# A page takes 0.3 MiB, and Python takes memory by 1 MiB. Being as large as this it is a mapping of
# its own, which goes back to the kernel at once.
RESERVE_BYTES = 4 * 2**20


class PostMortem:
    """Writes the reports of one rank. Used on the training thread.

    It does not raise for want of memory or disk; what else may go wrong is for `fail_open.wrap`.
    """

    def __init__(self, rank: int, sources: OomContext) -> None:
        self._rank = rank
        self._sources = sources
        self._host = socket.gethostname()
        self._reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self._num_reports = 0
        # The last error, its traceback and that one's innermost link, by their addresses.
        self._last = (0, 0, 0)

    def on_error(self, error: BaseException, *, is_end: bool = False) -> OomError | None:
        """Report an error if it is out-of-memory and was not reported on its way up.

        Args:
            error: One that passes now.
            is_end: Whether it is the one that ends the run; its traceback may have been shortened.

        Returns:
            What it says, to be counted; None for any other error, and for one known already.
        """
        found = parse_oom_error(error)
        if found is None or self._is_known(found[0], error, is_end=is_end):
            return None
        said = found[1]
        self._num_reports += 1
        if self._num_reports > MAX_REPORTS:  # the script catches them: this costs it time
            return replace(said, device=device_of(said, self._sources.readings() or {}))
        self._reserve = None
        try:
            said = self._report(said, self._sources)
        except MemoryError:
            said = self._report_least(said)
        self._take_reserve()
        return said

    def _is_known(self, error: BaseException, passing: BaseException, *, is_end: bool) -> bool:
        """Whether it was seen further down. It is not held meanwhile, for it holds the tensors.

        An error's traceback grows at its head on the way up. Another error may come to lie at the
        same address later, but not with the same traceback inside of its own.
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

    def _report_least(self, said: OomError) -> OomError:
        """Report what costs no memory to find out; the planner's tables, for one, may not fit."""
        known = self._sources
        least = OomContext(
            folder=known.folder, step=known.step, phase=known.phase, readings=lambda: None
        )
        try:
            return self._report(said, least)
        except MemoryError:
            logger.error("out of memory: %s (too little is left for a report)", said.message)
            return said

    def _report(self, said: OomError, sources: OomContext) -> OomError:
        """Write and log; return what is said, with the device's whole name."""
        evidence = collect_evidence(self._rank, self._host, said, sources)
        path, trouble = None, "no run folder is written"
        folder = self._sources.folder()
        if folder is not None:
            path, trouble = self._write(folder, evidence)
        where = f"report: {path}" if path is not None else f"no report, as {trouble}"
        logger.error("%s (%s)", headline(evidence), where)
        return replace(said, device=evidence.device)

    def _write(self, folder: Path, evidence: Evidence) -> tuple[Path | None, str]:
        snapshot = partial(self._sources.snapshot, evidence.device)
        try:
            path = write_report(folder, evidence, snapshot)
        except OSError as error:
            return None, f"it cannot be written: {error}"
        return path, "this rank has written as many as a run keeps"

    def _take_reserve(self) -> None:
        try:
            self._reserve = bytearray(RESERVE_BYTES)
        except MemoryError:  # the next report has to do without
            self._reserve = None


def _links(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
