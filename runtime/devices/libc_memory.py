"""Reads memory through the C library: the free heap, and the resident part of a buffer.

Free heap is part of RSS but not in use. glibc returns large blocks to the kernel only at first.
Each freed block raises the minimum size of the blocks that glibc returns, up to 32 MiB. Smaller
blocks stay in the heap. The activations of the next step therefore reuse the memory that the
activations of a step leave behind.

The resident part of a buffer is the pages that were ever written. DeepSpeed allocates reduction
buckets of half a billion elements by `torch.empty`. A small model writes only a part of a bucket.
The rest is address space without memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

_PAGE = mmap.PAGESIZE
# Smaller buffers are not examined: they are in the heap, where other data shares their pages.
_MIN_BYTES = 2**20


class _MallocInfo(ctypes.Structure):
    """Mirrors `struct mallinfo2` of malloc.h."""

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
    """Return the free bytes in all heaps of the C library, or 0 if it has no mallinfo2."""
    ask = _mallinfo()
    return 0 if ask is None else int(ask().fordblks)


@cache
def _mallinfo() -> Callable[[], _MallocInfo] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
    if function is not None:
        function.restype = _MallocInfo
    return function


def resident_bytes(address: int, size: int) -> int:
    """Return how many of `size` bytes from `address` on are backed by memory.

    Buckets are filled from the front, so bisection finds the end of the written part. It takes
    about 20 system calls of under a microsecond each. Without mincore, the result is `size`.
    """
    if size < _MIN_BYTES:
        return size
    first = -(-address // _PAGE)
    last = (address + size) // _PAGE - 1
    if _in_memory(last):
        return size
    written, empty = first - 1, last
    while empty - written > 1:
        middle = (written + empty) // 2
        if _in_memory(middle):
            written = middle
        else:
            empty = middle
    return empty * _PAGE - address if empty > first else 0


def _in_memory(page: int) -> bool:
    """Return whether a page is resident, or True if mincore is not available."""
    answer = ctypes.c_ubyte(1)
    mincore = _mincore()
    if mincore is None or mincore(page * _PAGE, _PAGE, ctypes.byref(answer)) != 0:
        return True
    return bool(answer.value & 1)


@cache
def _mincore() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    function = getattr(ctypes.CDLL(None), "mincore", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function
