"""Runs code sections that all ranks complete or none. A failure on one rank is raised on all."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ...errors import CheckpointError
from .host_group import HostCollectives
from .peer_failures import FailureCapture


class PeerAttemptError(RuntimeError):
    """Another rank failed in a code section that all ranks had entered."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error was raised on this rank only because another rank failed."""
    cause: BaseException | None = error
    seen: set[int] = set()  # causes may form a cycle
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerAttemptError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


class CollectiveAttempt:
    """Runs a code section on all ranks: use it in a `with` statement, then read `error`.

    The section's exceptions are caught, so that the caller can undo partial work on every rank. In
    the section, call `check_peers` before each collective, because a failed rank would not enter
    the collective.

    Attributes:
        error: The exception that ended the section on this rank; `PeerAttemptError` if only another
            rank failed.
    """

    def __init__(self, host_group: HostCollectives) -> None:
        self.error: Exception | None = None
        self._host_group = host_group

    def check_peers(self) -> None:
        """Wait until each rank has called `check_peers` or has failed.

        Raises:
            PeerAttemptError: A rank has failed.
        """
        if self._host_group.all_max(0):
            raise PeerAttemptError("another rank has failed")

    def __enter__(self) -> CollectiveAttempt:
        """Enter the section."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Exchange with the other ranks whether any rank has failed."""
        if error is None:
            self.error = self._peers_error()
            return True
        if not isinstance(error, Exception):
            return False
        self.error = error
        # The frames of the exception reference objects that were only partly built.
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, PeerAttemptError):
            self._host_group.all_max(1)
        return True

    def _peers_error(self) -> Exception | None:
        failed = self._host_group.all_max(0)
        return PeerAttemptError("another rank has failed") if failed else None


@contextmanager
def raise_on_all_ranks(host_group: HostCollectives, action: str, state: str) -> Iterator[None]:
    """Wait for all ranks at the end of the block. If one rank failed, raise on all ranks.

    Args:
        host_group: The group of all ranks.
        action: The action of the block. The message reads "cannot <action>: ...".
        state: The state after a failure, as a sentence for the end of the message.

    Raises:
        CheckpointError: The block raised OSError or CheckpointError on this rank, or any exception
            on another rank.
        Exception: The block raised this exception on this rank. Interrupts and exits are not
            exchanged.
    """
    with FailureCapture() as capture:
        yield
    failure = capture.take()
    try:
        flags = host_group.all_gather([failure is not None])
        if isinstance(failure, OSError):
            raise CheckpointError(f"cannot {action}: {failure}. {state}") from failure
        if failure is not None:
            raise failure
    except Exception as error:
        if failure is None or error is failure or error.__cause__ is failure:
            raise
        raise failure from error  # the exchange failed, too, but the caller must see its own error
    finally:
        failure = None  # see FailureCapture.take
    failed = [rank for rank, (flag,) in enumerate(flags) if flag]
    if failed:
        ranks = ", ".join(map(str, failed))
        raise CheckpointError(
            f"cannot {action}: failed on rank {ranks}, whose error has the reason. {state}"
        )
