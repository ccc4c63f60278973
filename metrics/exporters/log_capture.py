"""Captures zerowatch's own log records, for export by OTLP."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .telemetry_data import AttributeValue, LogLine

OWN_LOGGER = "zerowatch"


class LogCapture(logging.Handler):
    """Passes each record of zerowatch's loggers to `take`, from `open` until `close`.

    Args:
        take: Receives each record on the thread that logs it. This function must not raise.
    """

    def __init__(self, take: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._take = take

    def open(self) -> None:
        """Start capturing."""
        logging.getLogger(OWN_LOGGER).addHandler(self)

    def close(self) -> None:
        """Stop capturing. Safe to call twice."""
        logging.getLogger(OWN_LOGGER).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record."""
        self._take(record)


def log_line(record: logging.LogRecord, rank: int, ids: tuple[int, int] | None) -> LogLine:
    """Convert a log record to a line for OTLP.

    Args:
        record: The log record.
        rank: The global rank.
        ids: The ids of the trace and the span that the record belongs to. None without a trace.
    """
    attributes: dict[str, AttributeValue] = {
        "zerowatch.rank": rank,
        "thread.name": utf8_text(record.threadName or ""),
    }
    if record.exc_info and record.exc_info[0] is not None:
        kind, error, _ = record.exc_info
        attributes["exception.type"] = kind.__qualname__
        stack = logging.Formatter().formatException(record.exc_info)
        attributes["exception.message"] = utf8_text(str(error))
        attributes["exception.stacktrace"] = utf8_text(stack)
    trace_id, span_id = ids or (0, 0)
    return LogLine(
        logger=record.name,
        unix_ns=int(record.created * 1e9),
        level=record.levelno,
        text=utf8_text(record.getMessage()),
        attributes=attributes,
        trace_id=trace_id,
        span_id=span_id,
    )


def utf8_text(text: str) -> str:
    r"""Return a text with an escape for each character that UTF-8 does not have.

    Such characters are surrogates, which Python uses for bytes of file names that are not UTF-8.
    OTLP's encoding refuses a whole batch in which one is left.

    Examples:
        >>> print(utf8_text("no file /data/caf\udce9"))
        no file /data/caf\udce9
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
