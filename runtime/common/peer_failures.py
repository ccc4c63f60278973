"""Raises failures of the script's own code on all ranks if they occur on some ranks."""

from __future__ import annotations

import json
from traceback import TracebackException
from types import TracebackType

from ...errors import PeerFailedError
from .host_group import HostCollectives

_MAX_CHARACTERS = 500


class FailureCapture:
    """Suppresses and keeps an exception of a `with` block. Interrupts and exits propagate."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __enter__(self) -> FailureCapture:
        """Begin the block."""
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Suppress an exception."""
        if isinstance(error, Exception):
            self._error = error
        return self._error is not None

    def take(self) -> Exception | None:
        """Return and forget the exception that ended the block, or None without an exception.

        If a function keeps its own exception, the function's frame and the traceback form a
        reference cycle. The cycle would keep the tensors of the failed pass alive until the next
        garbage collection.
        """
        error, self._error = self._error, None
        return error


def raise_failures(host_group: HostCollectives, error: Exception | None, place: str) -> None:
    """Exchange the errors of all ranks, and raise if any rank has one. All ranks call this.

    Args:
        host_group: Group of all ranks.
        error: This rank's error, if any.
        place: Where the error was raised. The message on the other ranks begins with this text.

    Raises:
        Exception: This rank's own error.
        PeerFailedError: Only other ranks have an error.
    """
    try:
        own = "" if error is None else json.dumps(describe_error(error))
        reports = host_group.all_gather_text(own)
        if error is not None:
            raise error
    except Exception as exchange_error:
        if error is None or exchange_error is error:
            raise
        raise error from exchange_error  # the script must see its own error
    finally:
        error = None  # see FailureCapture.take
    failed = tuple(rank for rank, report in enumerate(reports) if report)
    if failed:
        error_type, error_text = json.loads(reports[failed[0]])
        raise PeerFailedError(failed[0], error_type, error_text, place, failed)


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the type and text of an error, even if its `__str__` fails."""
    text = str(TracebackException(type(error), error, None))
    return type(error).__name__, text[:_MAX_CHARACTERS]
