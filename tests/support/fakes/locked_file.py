"""A file that another process has locked, as rank 0 of a live run locks its run folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK_AND_WAIT = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1], 'w')\n"
    "fcntl.lockf(file, fcntl.LOCK_EX)\n"
    "print('locked', flush=True)\n"
    "sys.stdin.read()"
)


@contextmanager
def locked_by_another_process(file: Path) -> Iterator[None]:
    """Let another process hold the lock of a file. Missing folders are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", _LOCK_AND_WAIT, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            process.kill()
