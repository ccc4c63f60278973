"""Recognizes out-of-memory errors by type name and text, without importing torch.

The texts are those of torch 2.13 (c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDACachingAllocator.cpp,
CUDAMallocAsyncAllocator.cpp, ATen/cuda/Exceptions.h and ProcessGroupNCCL), of Python and of numpy.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

# The layer that failed to allocate, in this order: torch's allocator of a device; a library that
# bypasses this allocator on the device; torch's allocator of the host; Python, numpy or C++; the
# kernel; a layer that the text does not name.
Kind = Literal[
    "device allocator", "device library", "host allocator", "python", "operating system", "unknown"
]
UNKNOWN_DEVICE = "unknown"  # the text names no device

# Maximum errors examined in a chain of causes, and characters examined and kept of a text.
MAX_CHAIN = 16
MAX_TEXT = 100_000
MAX_MESSAGE = 1000

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
# No pattern starts with a wildcard, because matching would then take quadratic time.
_DEVICE_ALLOCATOR = re.compile(r"\b(CUDA|HIP|XPU|NPU) out of memory\b")
_DEVICE_LIBRARY = re.compile(
    r"\b(?:CUDA|HIP)(?: driver)? error: out of memory"
    r"|\b(?:CU|HIP)\w{1,40}_ALLOC_FAILED\b"
    r"|\bCUDNN_STATUS_\w{1,40}_ALLOCATION_FAILED\b"
    r"|\b(?:Cuda|HIP) failure (?:\d+ )?'out of memory'"
    # NCCL; its communicators are created in the first call, when the device may be full.
    r"|\bFailed to (?:CUDA|HIP) (?:host )?[cm]?alloc\b"
)
# CUDA's own text for the error. Extensions pass this text on, alone or after a colon.
_BARE = re.compile(r"(?im:(?:^|[:\]] ?)(?:error: )?out of memory[.!]?$)")
_MAKER = re.compile(r"\b(CUDA|HIP)\b")
_HOST_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"(?:: you tried to allocate (\d+) bytes)?"
)
_ARRAY = re.compile(r"Unable to allocate (\d+(?:\.\d+)?) (bytes|[KMGTP]iB)")
_PYTHON = re.compile(r"std::bad_alloc|\bMemoryError\b")
# The text must name mmap: network libraries also report "Cannot allocate memory" if the limit on
# locked memory is exceeded.
_KERNEL = re.compile(r"\bunable to mmap (\d+) bytes\b[^\n]*\bCannot allocate memory\b")
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}")
_INDEX = re.compile(r"\bGPU (\d+) has a total capacity")
_WORKER = re.compile(r"^Caught \w+ in (\S.*? process \d+)\.")
_REPORTED = {
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "in_use": re.compile(rf"this process has {_SIZE} memory in use"),
    "allowed": re.compile(rf"{_SIZE} allowed"),
    "allocated": re.compile(rf"Of the allocated memory {_SIZE}"),
    "private_pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "reserved_unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
# With PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync.
_ASYNC_ALLOCATOR = re.compile(r"\bAllocation on device (\d+) would exceed allowed memory\b")
_ASYNC_SIZES = {
    "requested": re.compile(rf"Requested *: {_SIZE}"),
    "allocated": re.compile(rf"Currently allocated *: {_SIZE}"),
    "free": re.compile(rf"Free \(according to CUDA\): {_SIZE}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OomError:
    """The content of an out-of-memory error, as read from its type and text.

    Attributes:
        kind: The layer that failed to allocate, such as "device allocator".
        device: The device, such as "cuda:0", or "cuda" if the text has no index. "cpu" for the
            host, and UNKNOWN_DEVICE if the text names no device.
        requested_bytes: Size of the request. For a device, the text gives this size with two
            decimals only.
        message: The line that describes the error, without a stack.
        reported_bytes: Other sizes in the text: total, free, in_use, allowed (by
            `set_per_process_memory_fraction`), allocated, private_pools, reserved_unallocated.
            torch calls the free blocks of private pools "allocated in private pools": allocated
            includes private_pools, and reserved_unallocated does not.
        worker: The process that raised the error, if it was not the current process.
    """

    kind: Kind
    device: str
    requested_bytes: float | None
    message: str
    reported_bytes: Mapping[str, float] = field(default_factory=dict)
    worker: str | None = None


def find_oom_error(error: BaseException) -> tuple[BaseException, OomError] | None:
    """Return the first out-of-memory error in a chain of errors, and its parsed content."""
    for link in _chain(error):
        parsed = _parse(link)
        if parsed is not None:
            return link, parsed
    return None


def is_caused_by_oom(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error, or was raised `from` one.

    Only `__cause__` is followed. An error that was raised while an out-of-memory error was being
    handled (`__context__`) does not count.
    """
    return any(_parse(link) is not None for link in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, followed by the errors that it was raised `from`."""
    link: BaseException | None = error
    for _ in range(MAX_CHAIN):  # causes may form a cycle
        if link is None:
            return
        yield link
        link = link.__cause__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, followed by its causes, its contexts and the members of its group."""
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


def _parse(error: BaseException) -> OomError | None:
    if isinstance(error, MemoryError):
        parsed = _parse_text(str(error))
        if parsed is None or parsed.device == UNKNOWN_DEVICE:
            return _on_host("python", str(error) or "MemoryError", None)
        return parsed
    if isinstance(error, OSError):
        short = error.errno == errno.ENOMEM
        return _on_host("operating system", str(error), None) if short else None
    if not isinstance(error, RuntimeError):
        return None
    parsed = _parse_text(str(error)[:MAX_TEXT])
    if parsed is None and type(error).__name__ == "OutOfMemoryError":
        return OomError(
            kind="device allocator",
            device=UNKNOWN_DEVICE,
            requested_bytes=None,
            message=str(error)[:MAX_MESSAGE],
        )
    return parsed


def _parse_text(text: str) -> OomError | None:
    """Parse the text of an error, which may contain the stack of another process."""
    worker = _WORKER.match(text)
    # The last line of a stack describes the error. The lines before it show source code.
    parsed = _parse_line(text.rstrip().rpartition("\n")[2] if worker else text)
    if parsed is None or worker is None:
        return parsed
    return OomError(
        kind=parsed.kind,
        device=parsed.device,
        requested_bytes=parsed.requested_bytes,
        message=parsed.message,
        reported_bytes=parsed.reported_bytes,
        worker=worker[1],
    )


def _parse_line(text: str) -> OomError | None:
    if match := _DEVICE_ALLOCATOR.search(text):
        # The script or the launcher may have wrapped the rest of the message over several lines.
        rest = text[match.start() : match.start() + MAX_MESSAGE].replace("\n", " ")
        return _on_device("device allocator", match[1], rest)
    if match := _ASYNC_ALLOCATOR.search(text):
        return _on_async_allocator(match[1], text[match.start() : match.start() + MAX_MESSAGE])
    if match := _DEVICE_LIBRARY.search(text):
        maker = "HIP" if "HIP" in match[0] else "CUDA"
        return _on_device("device library", maker, _line_of(match))
    if match := _BARE.search(text):
        line = _line_of(match)
        if named := _MAKER.search(line):
            return _on_device("device library", named[1], line)
        return OomError(
            kind="unknown",
            device=UNKNOWN_DEVICE,
            requested_bytes=None,
            message=line.strip()[:MAX_MESSAGE],
        )
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
    name = "cuda" if maker == "HIP" else maker.lower()  # torch also calls AMD devices cuda
    sizes = {what: pattern.search(text) for what, pattern in _REPORTED.items()}
    return OomError(
        kind=kind,
        device=f"{name}:{index[1]}" if index else name,
        requested_bytes=_bytes(request[1], request[2]) if request else None,
        message=text.strip()[:MAX_MESSAGE],
        reported_bytes={what: _bytes(size[1], size[2]) for what, size in sizes.items() if size},
    )


def _on_async_allocator(index: str, text: str) -> OomError:
    found = {what: pattern.search(text) for what, pattern in _ASYNC_SIZES.items()}
    sizes = {what: _bytes(size[1], size[2]) for what, size in found.items() if size}
    return OomError(
        kind="device allocator",
        device=f"cuda:{index}",
        requested_bytes=sizes.pop("requested", None),
        message=text.partition("\n")[0].strip(),
        reported_bytes=sizes,
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
