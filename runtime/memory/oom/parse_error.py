"""Tells an out-of-memory error from all others, by its type's name and its text. Knows no torch.

The texts are those of torch 2.13: c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp,
ATen/cuda/Exceptions.h, ProcessGroupNCCL; and Python's and numpy's own.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

# Who could not get memory: torch's allocator for a device; a library on the device, which allocates
# past torch; torch's allocator on the host; Python, numpy or C++; the kernel.
Kind = Literal["device allocator", "device library", "host allocator", "python", "operating system"]

MAX_CHAIN = 16
MAX_TEXT = 100_000
MAX_MESSAGE = 1000

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
# None begins with a wildcard: that would take a time that grows with the square of the text.
_DEVICE_ALLOCATOR = re.compile(r"\b(CUDA|HIP|XPU|NPU) out of memory\b")
_DEVICE_LIBRARY = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|\b(?:CU|HIP)\w{1,40}_ALLOC_FAILED\b"
    r"|\bCUDNN_STATUS_\w{1,40}_ALLOCATION_FAILED\b"
    r"|\b(?:Cuda|HIP) failure (?:\d+ )?'out of memory'"
)
_HOST_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"(?:: you tried to allocate (\d+) bytes)?"
)
_ARRAY = re.compile(r"Unable to allocate (\d+(?:\.\d+)?) (bytes|[KMGTP]iB)")
_PYTHON = re.compile(r"std::bad_alloc|\bMemoryError\b")
# Not every "Cannot allocate memory": network libraries say it of the limit on locked memory too.
_KERNEL = re.compile(r"\bunable to mmap (\d+) bytes\b[^\n]*\bCannot allocate memory\b")
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}")
_INDEX = re.compile(r"\bGPU (\d+) has a total capacity")
_WORKER = re.compile(r"^Caught \w+ in (\S.*? process \d+)\.")
_TOLD = {
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "in_use": re.compile(rf"this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE}"),
    "reserved_unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OomError:
    """An error that says that memory ran out.

    Attributes:
        kind: Who could not get memory.
        device: Such as "cuda:0"; "cuda" where the text does not say which; else "cpu".
        requested_bytes: What was asked for; on a device in two digits of its unit, as the text is.
        message: The line that says so, without any stack.
        told_bytes: What the text says beside: total, free, in_use, allowed (by
            `set_per_process_memory_fraction`), allocated, reserved_unallocated.
        worker: The process in which it was raised, if that is not this one.
    """

    kind: Kind
    device: str
    requested_bytes: float | None
    message: str
    told_bytes: Mapping[str, float] = field(default_factory=dict)
    worker: str | None = None


def out_of_memory(error: BaseException) -> OomError | None:
    """Say what ran out if this error, or one that it wraps or answers, is out-of-memory."""
    found = parse_oom_error(error)
    return None if found is None else found[1]


def is_caused_by_oom(error: BaseException) -> bool:
    """Whether an error is out-of-memory or raised from one; not if it only came after one."""
    link: BaseException | None = error
    while link is not None:
        if _read(link) is not None:
            return True
        link = link.__cause__
    return False


def parse_oom_error(error: BaseException) -> tuple[BaseException, OomError] | None:
    """Return the error in the chain that is out-of-memory, and what it says."""
    for link in _chain(error):
        said = _read(link)
        if said is not None:
            return link, said
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what it wraps or was raised during, each once."""
    waiting, seen = [error], 0
    while waiting and seen < MAX_CHAIN:
        link = waiting.pop(0)
        yield link
        seen += 1
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        elif link.__context__ is not None and not link.__suppress_context__:
            waiting.append(link.__context__)


def _read(error: BaseException) -> OomError | None:
    if isinstance(error, MemoryError):
        return _read_text(str(error)) or _on_host("python", "MemoryError", None)
    if isinstance(error, OSError):
        short = error.errno == errno.ENOMEM
        return _on_host("operating system", str(error), None) if short else None
    if not isinstance(error, RuntimeError):
        return None
    said = _read_text(str(error)[:MAX_TEXT])
    if said is None and type(error).__name__ == "OutOfMemoryError":
        return OomError(
            kind="device allocator",
            device="cuda",
            requested_bytes=None,
            message=str(error)[:MAX_MESSAGE],
        )
    return said


def _read_text(text: str) -> OomError | None:
    """Read the text of an error, which may hold the whole stack of another process's."""
    worker = _WORKER.match(text)
    # Of a stack that came along, the last line is the error; the lines before are source code.
    said = _read_line(text.rstrip().rpartition("\n")[2] if worker else text)
    if said is None or worker is None:
        return said
    return OomError(
        kind=said.kind,
        device=said.device,
        requested_bytes=said.requested_bytes,
        message=said.message,
        told_bytes=said.told_bytes,
        worker=worker[1],
    )


def _read_line(text: str) -> OomError | None:
    if match := _DEVICE_ALLOCATOR.search(text):
        # The rest may go on for some lines, by the script or by the launcher.
        rest = text[match.start() : match.start() + MAX_MESSAGE].replace("\n", " ")
        return _on_device("device allocator", match[1], rest)
    if match := _DEVICE_LIBRARY.search(text):
        maker = "HIP" if "HIP" in match[0] else "CUDA"
        return _on_device("device library", maker, _line_of(match))
    if match := _HOST_ALLOCATOR.search(text):
        return _on_host("host allocator", _line_of(match), float(match[1]) if match[1] else None)
    if match := _KERNEL.search(text):
        return _on_host("operating system", _line_of(match), float(match[1]))
    if match := _ARRAY.search(text):
        return _on_host("python", _line_of(match), _bytes(match[1], match[2]))
    if match := _PYTHON.search(text):
        return _on_host("python", _line_of(match), None)
    return None


def _line_of(match: re.Match[str]) -> str:
    text = match.string
    end = text.find("\n", match.end())
    return text[text.rfind("\n", 0, match.start()) + 1 : end if end >= 0 else len(text)]


def _on_device(kind: Kind, maker: str, text: str) -> OomError:
    request, index = _REQUEST.search(text), _INDEX.search(text)
    name = "cuda" if maker == "HIP" else maker.lower()  # torch calls AMD's devices so too
    told = {what: pattern.search(text) for what, pattern in _TOLD.items()}
    return OomError(
        kind=kind,
        device=f"{name}:{index[1]}" if index else name,
        requested_bytes=_bytes(request[1], request[2]) if request else None,
        message=text.strip()[:MAX_MESSAGE],
        told_bytes={what: _bytes(size[1], size[2]) for what, size in told.items() if size},
    )


def _on_host(kind: Kind, text: str, requested_bytes: float | None) -> OomError:
    return OomError(
        kind=kind,
        device="cpu",
        requested_bytes=requested_bytes,
        message=text.strip()[:MAX_MESSAGE],
    )


def _bytes(number: str, unit: str) -> float:
    return float(number) * _UNITS[unit]
