"""zerowatch's log records as lines for OTLP, while the capture is open."""

from __future__ import annotations

import logging
import sys

import pytest

from zerowatch.metrics.exporters.log_capture import LogCapture, log_line


def made(**more):
    fields = {"name": "zerowatch.part", "levelno": logging.WARNING, "msg": "of %d", "args": (3,)}
    return logging.makeLogRecord({**fields, "created": 1.5, "threadName": "main", **more})


@pytest.mark.parametrize(("ids", "trace", "span"), [(None, 0, 0), ((17, 5), 17, 5)])
def test_a_line_has_its_text_time_level_rank_and_trace(ids, trace, span):
    line = log_line(made(), rank=3, ids=ids)

    assert (line.logger, line.text, line.level) == ("zerowatch.part", "of 3", logging.WARNING)
    assert line.unix_ns == 1_500_000_000
    assert line.attributes == {"zerowatch.rank": 3, "thread.name": "main"}
    assert (line.trace_id, line.span_id) == (trace, span)


def test_a_line_of_an_exception_has_its_type_message_and_stack():
    try:
        raise KeyError("gone")
    except KeyError:
        error = sys.exc_info()

    attributes = log_line(made(exc_info=error), rank=3, ids=None).attributes

    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.message"] == "'gone'"
    assert str(attributes["exception.stacktrace"]).startswith("Traceback")
    assert str(attributes["exception.stacktrace"]).endswith("KeyError: 'gone'")


def test_a_record_without_a_current_exception_or_thread_has_no_such_attributes():
    line = log_line(made(exc_info=(None, None, None), threadName=None), rank=3, ids=None)

    assert line.attributes == {"zerowatch.rank": 3, "thread.name": ""}


def test_texts_that_are_not_utf_8_become_escapes():
    """A file name that is not UTF-8 has surrogates, which OTLP's encoding refuses."""
    path = b"/data/caf\xe9".decode("utf-8", "surrogateescape")
    try:
        raise FileNotFoundError(path)
    except FileNotFoundError:
        error = sys.exc_info()

    line = log_line(
        made(msg="é: no %s", args=(path,), exc_info=error, threadName=path), rank=3, ids=None
    )

    assert line.text == r"é: no /data/caf\udce9"
    assert line.attributes["exception.message"] == r"/data/caf\udce9"
    assert line.attributes["thread.name"] == r"/data/caf\udce9"
    stack = str(line.attributes["exception.stacktrace"])
    assert stack.endswith(r"FileNotFoundError: /data/caf\udce9")


def test_only_records_of_zerowatch_are_captured_and_only_until_the_close():
    seen: list[str] = []
    capture = LogCapture(lambda record: seen.append(record.getMessage()))
    own, other = logging.getLogger("zerowatch.part"), logging.getLogger("other")

    own.error("before")
    capture.open()
    own.error("while open")
    other.error("of others")
    capture.close()
    capture.close()
    own.error("after")

    assert seen == ["while open"]
