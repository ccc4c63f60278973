"""Out-of-memory errors of a window: caught, attributed to a rank, and compared over ranks."""

from __future__ import annotations

import time
import traceback
from enum import Enum
from types import TracebackType
from typing import Any

from ...memory.oom.parse_error import is_caused_by_oom

CONSENSUS_SECONDS = 20.0
_POLL_SECONDS = 0.02
_PREFIX = "zerowatch/out_of_memory"


class PeerOutOfMemory(RuntimeError):
    """Another rank ran out of memory, so this rank aborts the window too."""


class OomOrigin(Enum):
    """The rank whose memory ran out: this one, or another."""

    OWN = "own"
    PEER = "peer"


class OomCapture:
    """Context manager that suppresses out-of-memory errors and keeps them; other errors propagate.

    Attributes:
        error: The error that ended the block; None if none did.
        origin: The rank whose memory ran out; None if none did.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.origin: OomOrigin | None = None

    def __enter__(self) -> OomCapture:
        """Begin the block."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Suppress an error that is about memory."""
        if error is not None:
            self.origin, self.error = oom_origin(error)
        return self.origin is not None

    def clear_frames(self) -> None:
        """Free what the frames of the error hold; its traceback stays readable."""
        for link in _chain(self.error):
            traceback.clear_frames(link.__traceback__)


def oom_origin(error: BaseException) -> tuple[OomOrigin | None, BaseException | None]:
    """Return whose memory ran out and the error that shows it; (None, None) for other errors.

    While a window is aborted, one more collective may be called, and raises PeerOutOfMemory over
    this rank's own error. Likewise any error may be raised over a PeerOutOfMemory.
    """
    if not isinstance(error, Exception):  # an interrupt propagates
        return None, None
    if is_caused_by_oom(error):
        return OomOrigin.OWN, error
    chain = _chain(error)
    if not any(isinstance(link, PeerOutOfMemory) for link in chain):
        return None, None
    own = [link for link in chain if is_caused_by_oom(link)]
    return (OomOrigin.OWN, own[-1]) if own else (OomOrigin.PEER, error)


def all_ranks_oom(
    store: Any, attempt: int, *, rank: int, world_size: int, wait_seconds: float = CONSENSUS_SECONDS
) -> bool:
    """Return whether all ranks ran out of memory in an attempt that was not guarded.

    Each rank that ran out writes a key to the c10d store and waits for the keys of all others.
    Ranks that did not run out wait in a collective that this rank will not enter, and cannot be
    notified. If all ran out, as with equal shares and sizes, none is in one.

    Args:
        store: The store of the default process group.
        attempt: A number of this attempt, the same on all ranks and used once.
        rank: This rank.
        world_size: Number of ranks to wait for.
        wait_seconds: How long to wait for the slowest.
    """
    store.set(f"{_PREFIX}/{attempt}/{rank}", "")
    keys = [f"{_PREFIX}/{attempt}/{each}" for each in range(world_size)]
    deadline = time.monotonic() + wait_seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes and contexts, newest first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain
