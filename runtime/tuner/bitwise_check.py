"""Which knobs leave every bit of a job's gradients as they are: tried out, on one window.

Sums of floating-point numbers depend on their order. Whether a knob changes it depends on ranks,
backend and sizes, and is quicker tried than known. One window is evidence and no proof: lengths
that come later may be summed otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ..common.host_collectives import HostCollectives
from .policy.transaction import FAILURES
from .policy.types import KnobSetter, Undo, Value

logger = logging.getLogger(__name__)

# Passes of one window that are dropped again: their gradients as a number, None where memory
# ran out on some rank.
Passes = Callable[[], int | None]


def bitwise_invariant_knobs(
    passes: Passes,
    hands: KnobSetter,
    agreement: HostCollectives,
    knobs: Mapping[str, Sequence[Value]],
) -> frozenset[str]:
    """Return the knobs that change no bit of any rank's gradients, whichever value they are set to.

    All ranks call it alike, between two windows, and get the same answer. Each value costs the
    passes of a window. All knobs are then as they were.

    Args:
        passes: Such as `DryRunWindow.checksum` of the window that comes next.
        hands: What turns the knobs of this job.
        agreement: Between all ranks.
        knobs: Values to try, by knob; the same on all ranks.
    """
    expected = passes()
    if expected is None:
        return frozenset()
    test = _BitwiseCheck(passes, hands, agreement, expected)
    exact = frozenset(knob for knob, values in knobs.items() if test.is_exact(knob, values))
    logger.info("every bit of the gradients stays with any %s", ", ".join(sorted(exact)) or "knob")
    return exact


class _BitwiseCheck:
    def __init__(
        self, passes: Passes, hands: KnobSetter, agreement: HostCollectives, expected: int
    ) -> None:
        self._passes, self._hands = passes, hands
        self._agreement, self._expected = agreement, expected
        self._before = dict(hands.values())

    def is_exact(self, knob: str, values: Sequence[Value]) -> bool:
        """Whether the gradients are the same with all of these values; not with any: False."""
        others = [value for value in values if value != self._before.get(knob)]
        return bool(others) and all(self._is_same(knob, value) for value in others)

    def _is_same(self, knob: str, value: Value) -> bool:
        undo = self._turned(knob, value)
        if self._agreement.highest(undo is None):
            if undo is not None:
                undo()
            return False
        assert undo is not None
        try:
            found = self._passes()
        finally:
            undo()
        return not self._agreement.highest(found != self._expected)

    def _turned(self, knob: str, value: Value) -> Undo | None:
        """Return what turns the knob back; None where this rank cannot turn it."""
        try:
            return self._hands.apply({**self._before, knob: value})
        except FAILURES as error:
            logger.info("%s is not tried with %r: %s", knob, value, error)
            return None
