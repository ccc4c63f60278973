"""Whether a batch is shared out by the ranks' speeds."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import ZerowatchError
from ...trainer.data.data_source import TrainingData
from ..policy.types import Undo, Value


class LoadBalanceKnob:
    """Switches uneven shares on and off; no sample is lost or seen twice by it.

    The shares themselves change a window later, and behind what workers have loaded ahead.

    Args:
        sharing: Of the run.
    """

    name = "balance"

    def __init__(self, sharing: TrainingData) -> None:
        self._sharing = sharing

    def unsupported_reason(self) -> str | None:
        """Say why shares stay even in this job."""
        return self._sharing.always_even()

    def get(self) -> bool:
        """Return whether shares are to follow the speeds."""
        return self._sharing.balances

    def options(self) -> Sequence[Value]:
        """Return both."""
        return (False, True)

    def turn(self, value: Value) -> Undo:
        """Set it; nothing is agreed on here, where one rank may fail at something else.

        Raises:
            ZerowatchError: There is no such value.
        """
        if not isinstance(value, bool):
            raise ZerowatchError(f"{self.name} is True or False, got {value!r}")
        before, self._sharing.balances = self._sharing.balances, value

        def undo() -> None:
            self._sharing.balances = before

        return undo

    def is_applied(self, value: Value) -> bool:
        """Whether it is so."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: how much more a fast rank gets is known only then."""
        return None
