"""Finds out-of-memory errors, including a data loader's worker that the kernel's OOM killer ended.

torch's text on such a worker names only the signal, which others send too. The kernel's counters of
kills decide.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...common.liveness_file import ROOT, count_oom_kills, count_oom_kills_in
from .oom_error import MAX_CHAIN, MAX_TEXT, OomError, find_oom_error, is_caused_by_oom

# torch/csrc/DataLoader.cpp
_KILLED_WORKER = re.compile(r"^DataLoader worker \(pid (\d+)\) is killed by signal: Killed\b")


class OomFinder:
    """Finds out-of-memory errors of this process and of its data loaders' workers."""

    def __init__(self, root: Path = ROOT) -> None:
        """Read the kernel's counters.

        Args:
            root: The root of the file system. Tests set another root.
        """
        self._root = root
        self._kills_before = count_oom_kills(root)

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
        link: BaseException | None = error
        for _ in range(MAX_CHAIN):  # causes may form a cycle
            if link is None:
                return None
            text = str(link)[:MAX_TEXT] if isinstance(link, RuntimeError) else ""
            match = _KILLED_WORKER.match(text)
            reason = self._reason() if match else None
            if match and reason:
                return link, OomError(
                    kind="operating system",
                    device="cpu",
                    requested_bytes=None,
                    message=f"{match[0]} ({reason})",
                    worker=f"DataLoader worker with pid {match[1]}",
                )
            link = link.__cause__
        return None

    def _reason(self) -> str | None:
        """Return why the OOM killer has sent the signal, or None if another process has."""
        before = self._kills_before
        now = count_oom_kills_in(before.cgroup_file, self._root)
        killer, where = "by the kernel's OOM killer", "of this rank's memory cgroup"
        if before.cgroup is not None and now.cgroup is not None:
            kills = now.cgroup - before.cgroup
        elif before.host is not None and now.host is not None:
            kills, killer, where = now.host - before.host, f"probably {killer}", "on this host"
        else:
            return None
        if kills <= 0:
            return None
        return f"{killer}, which has killed {kills} process(es) {where} since the start"
