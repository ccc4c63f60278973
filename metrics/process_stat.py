"""Reads the state and the start of a process from /proc."""

from __future__ import annotations

from pathlib import Path


def state_and_start(pid: int | str, root: Path = Path("/")) -> tuple[str, str]:
    """Return fields 3 and 22 of proc_pid_stat(5): the state, and the start in clock ticks.

    In the states Z and X the process has exited, but its parent has not waited for it.

    Raises:
        OSError: There is no such process, or its start cannot be read.
    """
    text = (root / "proc" / str(pid) / "stat").read_text(errors="replace")
    after_name = text.rpartition(")")[2].split()  # field 2 may contain any characters
    return after_name[0], after_name[19]
