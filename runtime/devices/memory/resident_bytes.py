"""How much of a buffer on the host takes up memory: the pages that were ever written.

DeepSpeed makes reduction buckets of half a billion elements by `torch.empty`, of which a small
model writes a fraction. The rest is address space and no memory.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

_PAGE = mmap.PAGESIZE
_WORTH_ASKING = 2**20  # smaller ones lie in the heap, among others


def resident_bytes(address: int, size: int) -> int:
    """Return how many of `size` bytes from `address` on are backed by memory.

    Buckets are filled from the front, so that the end of what is written is found by halving: some
    20 system calls of under a microsecond. All of `size` where the kernel does not tell.
    """
    if size < _WORTH_ASKING:
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
    """Ask the kernel about one page; yes where it does not know."""
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
