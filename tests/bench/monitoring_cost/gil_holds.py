"""Measures how long each thread holds Python's interpreter lock (GIL), by sampling from C.

A library that gcc compiles reads every 20 us which thread has the lock, and that thread's CPU
clock. So a hold is known to about 50 us, and a thread that waits for a core while it has the lock
counts only with the CPU time that it has used.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAUSE_NS = 20_000
MOST_HOLDS = 2_000_000
_SOURCE = Path(__file__).with_suffix(".c")
_SEARCHED_BYTES = 512


class _Hold(ctypes.Structure):
    _fields_ = [
        ("thread_id", ctypes.c_int64),
        ("wall_ns", ctypes.c_int64),
        ("cpu_ns", ctypes.c_int64),
    ]


def missing() -> str | None:
    """Return why holds cannot be sampled here; None if they can."""
    if shutil.which("gcc") is None:
        return "gcc not found: apt-get install gcc"
    if sys.version_info >= (3, 12):
        return "from Python 3.12 on no other thread can read who holds the GIL"
    return None


@contextmanager
def sampled_holds(folder: Path) -> Iterator[dict[int, list[float]]]:
    """Sample until the end of the block; then the yielded dict has CPU seconds by thread id.

    Args:
        folder: Where the library is compiled.
    """
    library_file = folder / "gil_holds.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-o", library_file, _SOURCE, "-lpthread"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(library_file))
    library.begin.argtypes = [ctypes.c_long] * 3
    library.end.restype = ctypes.POINTER(_Hold)
    if library.begin(_offset_of_thread_id(), MOST_HOLDS, PAUSE_NS):
        raise RuntimeError("the thread that samples the GIL could not be started")
    found: dict[int, list[float]] = defaultdict(list)
    number = ctypes.c_long()
    try:
        yield found
    finally:
        holds = library.end(ctypes.byref(number))
        for one in holds[: number.value]:
            found[one.thread_id].append(one.cpu_ns / 1e9)


def _offset_of_thread_id() -> int:
    """Return where in a thread state the kernel's id of the thread is: where this thread has it."""
    current = ctypes.pythonapi.PyThreadState_Get
    current.restype = ctypes.c_void_p
    state = current()
    for offset in range(0, _SEARCHED_BYTES, ctypes.sizeof(ctypes.c_ulong)):
        if ctypes.c_ulong.from_address(state + offset).value == threading.get_native_id():
            return offset
    raise RuntimeError("the thread id is not in the thread state of this Python")
