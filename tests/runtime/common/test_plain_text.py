"""Tests of the texts of a run folder that are printed: `plain_text.py`."""

from __future__ import annotations

import io

import pytest

from zerowatch.runtime.common.plain_text import printable, write_if_open, write_line_if_open


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("loss\x1b[2J", "loss [2J"),
        ("one\ntwo\r\x00", "one two  "),
        ("night\udce9", "night "),
        ("modèle 7", "modèle 7"),
        (7, "7"),
    ],
)
def test_what_a_terminal_does_not_show_is_a_space(text: object, printed: str) -> None:
    assert printable(text) == printed


class Broken(io.StringIO):
    """A stream whose pipe is closed or whose disk is full."""

    def flush(self) -> None:
        raise OSError("closed")


def test_a_line_is_written_with_our_name_and_flushed() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()

    write_line_if_open(stream, "one")
    write_if_open(stream, "two")

    assert stream.flushed == "zerowatch: one\ntwo"


def test_a_stream_that_is_closed_or_full_raises_nothing() -> None:
    closed = io.StringIO()
    closed.close()

    for stream in (closed, Broken()):
        write_if_open(stream, "text")
