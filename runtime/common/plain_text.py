"""Prints safely: texts of a run folder from elsewhere, and to streams that may be closed."""

from __future__ import annotations

import contextlib
from typing import TextIO


def printable(text: object) -> str:
    r"""Return a text on one line, with a space for each unprintable character.

    Such characters are control codes of a terminal, line ends, and bytes of names that are not
    UTF-8, which neither a terminal nor JSON accepts.

    Examples:
        >>> printable("loss\x1b[2J")
        'loss [2J'
    """
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def encodable(text: str, stream: TextIO) -> str:
    """Return a text with a question mark for each character that a stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"  # that of the locale may lack the lines of a table
    return text.encode(encoding, "replace").decode(encoding)


def write_if_open(stream: TextIO, text: str) -> None:
    """Write a text, unless the pipe or the stream is closed or the disk is full."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def write_line_if_open(stream: TextIO, line: str) -> None:
    """Write a line of zerowatch's own, as `write_if_open` does; `zerowatch: ` is put before it."""
    write_if_open(stream, f"zerowatch: {line}\n")
