"""zerowatch's own log lines, taken as data where they are written; nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .telemetry_data import LogLine, Value

OWN_LOGGER = "zerowatch"


class OwnLogLines(logging.Handler):
    """Hands on each line that our loggers let through, from `open` until `close`.

    Args:
        take: Gets the lines, on whatever thread they are written. It must not raise.
        trace_of_now: Returns the trace and the span that a line of this moment belongs to; 0 and 0
            for none.
        rank: The global rank.
    """

    def __init__(
        self,
        take: Callable[[LogLine], object],
        trace_of_now: Callable[[], tuple[int, int] | None],
        rank: int,
    ) -> None:
        super().__init__()
        self._take = take
        self._trace_of_now = trace_of_now
        self._rank = rank

    def open(self) -> None:
        """Begin."""
        logging.getLogger(OWN_LOGGER).addHandler(self)

    def close(self) -> None:
        """End. Safe to call twice."""
        logging.getLogger(OWN_LOGGER).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line on."""
        attributes: dict[str, Value] = {
            "zerowatch.rank": self._rank,
            "zerowatch.logger": record.name,
            "thread.name": record.threadName or "",
        }
        kind, error, _ = record.exc_info or (None, None, None)
        if kind is not None:
            attributes["exception.type"] = kind.__qualname__
            attributes["exception.message"] = str(error)
            attributes["exception.stacktrace"] = logging.Formatter().formatException(
                record.exc_info  # type: ignore[arg-type]
            )
        trace_id, span_id = self._trace_of_now() or (0, 0)
        self._take(
            LogLine(
                unix_ns=int(record.created * 1e9),
                level=record.levelno,
                text=record.getMessage(),
                attributes=attributes,
                trace_id=trace_id,
                span_id=span_id,
            )
        )
