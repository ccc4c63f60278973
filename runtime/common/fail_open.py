"""The one place where watching fails open: a hook that raises is counted, logged and dropped."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class FailOpen:
    """Guards the hooks of one process and counts those that failed.

    The count is plain data, written on any thread and published by the watch thread, so that a
    failing hook does not depend on anything else that may fail.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def wrap(self, name: str, body: Callable[P, T]) -> Callable[P, T | None]:
        """Return `body` made safe: it returns None from its first exception on.

        Args:
            name: The value of the `hook` label under which a failure is counted.
            body: The hook. It must not call into the training.
        """
        dropped = False

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            nonlocal dropped
            if dropped:
                return None
            try:
                return body(*args, **kwargs)
            except Exception:  # whatever it is, training goes on
                dropped = True
                self.failures[name] += 1
                with contextlib.suppress(Exception):  # memory may be out
                    logger.warning(
                        "hook %r failed and was dropped; training goes on, its metrics stop. "
                        "Please report this.",
                        name,
                        exc_info=True,
                    )
                return None

        return guarded
