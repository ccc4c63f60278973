"""A wall clock that the bench can set, for the processes of one run: libfaketime.

The monotonic clock and the times of files stay as they are, as if the clock of a machine were set.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SLEEP = Path(__file__).with_name("monotonic_sleep.c")
# Not libfaketimeMT: its lock stays locked in a child that is forked while another thread holds it.
_LIBRARIES = "/usr/lib/*/faketime/libfaketime.so.1"
_CLOCK = "clock"
# A regular expression: each process leaves a segment and a semaphore in /dev/shm.
LEFT_BY_LIBRARY = r"(sem\.)?faketime_"


def missing() -> str | None:
    """Return why there can be no such clock here; None if there can."""
    if not glob.glob(_LIBRARIES):
        return "libfaketime not found: apt-get install faketime"
    if shutil.which("gcc") is None:
        return "gcc not found: apt-get install gcc"
    return None


def clock_variables(folder: Path) -> Mapping[str, str]:
    """Return the environment of processes that have the clock in a folder; it is right at first."""
    library = folder / "monotonic_sleep.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, _SLEEP], check=True)
    set_clock(folder, "+0")
    return {
        "LD_PRELOAD": f"{library}:{glob.glob(_LIBRARIES)[0]}",
        "FAKETIME_TIMESTAMP_FILE": str(folder / _CLOCK),
        "FAKETIME_CACHE_DURATION": "1",  # seconds until the file is read again
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def set_clock(folder: Path, offset: str) -> None:
    """Set the clock in a folder: seconds from the real time, such as "+3600"."""
    partial = folder / f"{_CLOCK}.partial"
    partial.write_text(f"{offset}\n")
    partial.rename(folder / _CLOCK)
