"""Fail-open hooks: a hook that raises is counted, logged and disabled, and training continues."""

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
    """Wraps hooks so that their exceptions never reach the training, and counts those that failed.

    Attributes:
        failures: Number of failed hooks by name. It is written on any thread and exported by the
            watch thread, so that a hook never calls the exporters itself.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def wrap(self, name: str, body: Callable[P, T]) -> Callable[P, T | None]:
        """Return a function that calls `body`, and returns None from its first exception on.

        Args:
            name: The value of the `hook` label under which a failure is counted.
            body: The hook. It must not call the training's own code.
        """
        dropped = False

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            nonlocal dropped
            if dropped:
                return None
            try:
                return body(*args, **kwargs)
            except Exception:  # of any kind: training continues
                dropped = True
                self.failures[name] += 1
                with contextlib.suppress(Exception):  # logging can fail too, such as without memory
                    logger.warning(
                        "hook %r failed and was dropped; training goes on, its metrics stop. "
                        "Please report this.",
                        name,
                        exc_info=True,
                    )
                return None

        return guarded
