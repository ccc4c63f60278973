"""Makes texts of a run folder safe to print: a folder may come from another machine or user."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Return a text on one line, with a space for each unprintable character.

    Such characters are control codes of a terminal, line ends, and bytes of names that are not
    UTF-8, which neither a terminal nor JSON accepts.

    Examples:
        >>> printable("loss\x1b[2J")
        'loss [2J'
    """
    return "".join(letter if letter.isprintable() else " " for letter in str(text))
