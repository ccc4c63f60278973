"""In which order the old and the new setting take turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Literal

# A is what the job worked with before, B what is on trial.
Arm = Literal["A", "B"]


def arm_sequence(*, starts_with: Arm, few_switches: bool) -> Iterator[Arm]:
    """Yield the arm of each block, without end; two blocks are a pair, in which both occur.

    Turned by Thue and Morse's sequence, neither steady drift nor one that bends favours an arm,
    nor does anything periodic. With few switches A B and B A alternate, which drops what drifts
    steadily only, but changes the setting but once a pair.
    """
    other: Arm = "A" if starts_with == "B" else "B"
    for pair in count():
        turned = pair % 2 if few_switches else pair.bit_count() % 2
        yield from (other, starts_with) if turned else (starts_with, other)
