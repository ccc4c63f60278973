"""Reads memory through the C library: the free heap, and the resident part of a buffer.

Free heap is part of RSS but not in use. glibc returns large blocks to the kernel only at first:
each freed block raises the size from which on blocks are returned, up to 32 MiB. Smaller ones stay
in its heap and serve the next pass. So the memory that activations leave at the end of a step is
reused by those of the next one.

The resident part of a buffer is the pages that were ever written. DeepSpeed makes reduction buckets
of half a billion elements by `torch.empty`, of which a small model writes a fraction; the rest is
address space only.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

_PAGE = mmap.PAGESIZE
# Smaller buffers are not examined: they lie in the heap, where others share their pages.
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
    """Return the free bytes in all of the C library's heaps; 0 where it has no mallinfo2."""
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

    Buckets are filled from the front, so the end of the written part is found by bisection: some 20
    system calls of under a microsecond. Without mincore it returns `size`.
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
    """Return whether a page is resident; True where mincore is not available."""
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
