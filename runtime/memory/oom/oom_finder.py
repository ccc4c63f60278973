"""Finds out-of-memory errors, including a data loader's worker that the kernel's OOM killer ended.

torch's text on such a worker names at most the signal, which others send too. The kernel's counters
of kills decide.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from traceback import format_exception_only, walk_tb

from ...common.liveness_file import ROOT, count_oom_kills, count_oom_kills_in
from .oom_error import (
    MAX_MESSAGE,
    MAX_TEXT,
    OomError,
    causes,
    find_oom_error,
    is_caused_by_oom,
)

# Kills are counted over this time, or up to twice as long. A thread in a long call of C, such as of
# a backward pass, raises the error of a killed worker only afterwards.
WINDOW_SECONDS = 60.0

# torch/csrc/DataLoader.cpp, which knows how a worker ended: by a signal, or with an exit code.
_ENDED_WORKER = re.compile(r"^DataLoader worker \(pid (\d+)\) (?:is killed|exited unexpectedly)\b")
_KILLED_WORKER = re.compile(r"^DataLoader worker \(pid (\d+)\) is killed by signal: Killed\b")
# torch/utils/data/dataloader.py, which only knows that a worker ended. It waits for data in
# _try_get_data, and an error of the connection to a worker passes through there.
_LOST_WORKER = re.compile(r"^DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly\b")
_WAIT_FILE, _WAIT_FUNCTION = "torch/utils/data/dataloader.py", "_try_get_data"


class OomFinder:
    """Finds out-of-memory errors of this process and of its data loaders' workers."""

    def __init__(self, root: Path = ROOT) -> None:
        """Read the kernel's counters.

        Args:
            root: The root of the file system. Tests set another root.
        """
        self._root = root
        # When the counters were read, and the counters. `find` compares with the earlier ones.
        self._before = self._latest = time.monotonic(), count_oom_kills(root)

    def refresh(self) -> None:
        """Forget kills of long ago. Called often, on any one thread; reads rarely."""
        now = time.monotonic()
        read_at, kills = self._latest
        if now - read_at >= WINDOW_SECONDS:
            self._before, self._latest = (
                self._latest,
                (now, count_oom_kills_in(kills.cgroup_file, self._root)),
            )

    def find(self, error: BaseException) -> tuple[BaseException, OomError] | None:
        """Return the first out-of-memory error in a chain of errors, and its content."""
        return find_oom_error(error) or self._find_killed_worker(error)

    def is_caused_by_oom(self, error: BaseException) -> bool:
        """Return whether an error is an out-of-memory error, or was raised `from` one."""
        return is_caused_by_oom(error) or self._find_killed_worker(error) is not None

    def _find_killed_worker(self, error: BaseException) -> tuple[BaseException, OomError] | None:
        """Return the error of a worker that the OOM killer has ended, and its content.

        Only the error and its causes are examined.
        """
        links = list(causes(error))
        for link in links:
            text = _text(link)
            if _ENDED_WORKER.match(text):
                match = _KILLED_WORKER.match(text)
                return self._killed(link, match[0], f" with pid {match[1]}") if match else None
        for link in links:
            if match := _LOST_WORKER.match(_text(link)):
                return self._killed(link, match[0], f" with pid {match[1]}", is_guess=True)
            if _is_lost_connection(link):
                text = format_exception_only(link)[-1].strip()[:MAX_MESSAGE]
                message = f"DataLoader worker no longer answers: {text}"
                return self._killed(link, message, "", is_guess=True)
        return None

    def _killed(
        self, link: BaseException, message: str, pid: str, *, is_guess: bool = False
    ) -> tuple[BaseException, OomError] | None:
        """Return the content of an error, or None if the OOM killer has killed no process."""
        reason = self._reason(is_guess=is_guess)
        if reason is None:
            return None
        return link, OomError(
            kind="operating system",
            device="cpu",
            requested_bytes=None,
            message=f"{message} ({reason})",
            worker=f"DataLoader worker{pid}",
        )

    def _reason(self, *, is_guess: bool) -> str | None:
        """Return why the OOM killer has ended the worker, or None if it has not."""
        read_at, before = self._before
        now = count_oom_kills_in(before.cgroup_file, self._root)
        where = "of this rank's memory cgroup"
        if before.cgroup is not None and now.cgroup is not None:
            kills = now.cgroup - before.cgroup
        elif before.host is not None and now.host is not None:
            kills, is_guess, where = now.host - before.host, True, "on this host"
        else:
            return None
        if kills <= 0:
            return None
        cause = "probable cause" if is_guess else "cause"
        seconds = time.monotonic() - read_at
        return (
            f"{cause}: the kernel's OOM killer, which has killed {kills} process(es) {where} in "
            f"the last {seconds:.0f} s"
        )


def _text(link: BaseException) -> str:
    return str(link)[:MAX_TEXT] if isinstance(link, RuntimeError) else ""


def _is_lost_connection(link: BaseException) -> bool:
    """Return whether torch lost the connection to a worker, from which it fetched a tensor."""
    if not isinstance(link, ConnectionError | EOFError):
        return False
    codes = (frame.f_code for frame, _ in walk_tb(link.__traceback__))
    return any(
        code.co_name == _WAIT_FUNCTION and code.co_filename.endswith(_WAIT_FILE) for code in codes
    )
