"""Free memory that the C library keeps in its heap: part of RSS, but not in use.

glibc returns large blocks to the kernel only at first: each one freed raises the size from which on
blocks are returned, up to 32 MiB. Smaller ones stay in its heap and serve the next pass. So the
memory that activations leave at the end of a step is reused by those of the next one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def free_heap_bytes() -> int:
    """Return the free bytes in all of the C library's heaps; 0 where it has no mallinfo2."""
    ask = _mallinfo()
    return 0 if ask is None else int(ask().fordblks)


@cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
    if function is not None:
        function.restype = _MallocInfo
    return function
