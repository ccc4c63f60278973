"""What ended an attempt at a window: this rank's memory, another's, or something else."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Literal

from ...memory.oom.parse_error import is_caused_by_oom
from .collective_guard import PeerOutOfMemory

Whose = Literal["own", "peer"]


class OomCapture:
    """A `with` block that want of memory ends as if it had come to its end; other errors pass.

    Attributes:
        error: What ended the block; None if nothing did.
        whose: Whose memory ran out; None if nothing ended the block.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.whose: Whose | None = None

    def __enter__(self) -> OomCapture:
        """Begin the block."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep an error that is about memory."""
        if error is not None:
            self.whose, self.error = whose_memory(error)
        return self.whose is not None

    def clear_frames(self) -> None:
        """Free what the frames of the error hold; its lines stay readable."""
        for link in _links(self.error):
            traceback.clear_frames(link.__traceback__)


def whose_memory(error: BaseException) -> tuple[Whose | None, BaseException | None]:
    """Tell whose memory ran out, and the error that says so; (None, None) for all other errors.

    While a window is being left, a collective may be called once more, and raises PeerOutOfMemory
    over this rank's own error; or any error may come over a PeerOutOfMemory.
    """
    if not isinstance(error, Exception):  # an interrupt is obeyed
        return None, None
    if is_caused_by_oom(error):
        return "own", error
    links = _links(error)
    if not any(isinstance(link, PeerOutOfMemory) for link in links):
        return None, None
    own = [link for link in links if is_caused_by_oom(link)]
    return ("own", own[-1]) if own else ("peer", error)


def _links(error: BaseException | None) -> list[BaseException]:
    """Return an error and what it came from, newest first."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
