"""Tests of the texts of a run folder that are printed: `plain_text.py`."""

from __future__ import annotations

import pytest

from zerowatch.runtime.common.plain_text import printable


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
