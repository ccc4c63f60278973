"""How many samples a batch holds over all ranks; the learning rate goes along."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import ZerowatchError
from ...trainer.data.data_source import TrainingData
from ..policy.types import Undo, Value


class GlobalBatchKnob:
    """Changes what the run's loader makes, from where it is; no sample is lost or seen twice by it.

    It holds a window later, and behind what workers have loaded ahead.

    Args:
        sharing: Of the run.
    """

    name = "batch_samples"

    def __init__(self, sharing: TrainingData) -> None:
        self._sharing = sharing

    def unsupported_reason(self) -> str | None:
        """Say why batches are as they are in this job."""
        return self._sharing.unsupported_resize_reason()

    def get(self) -> int:
        """Return what batches are to hold."""
        return self._sharing.batch_samples

    def options(self) -> Sequence[Value]:
        """Return multiples of what they began with."""
        return self._sharing.batch_sizes()

    def turn(self, value: Value) -> Undo:
        """Set it; nothing is agreed on here, where one rank may fail at something else.

        Raises:
            ZerowatchError: That is none of the options.
        """
        if not isinstance(value, int) or value not in self.options():
            raise ZerowatchError(f"{self.name} is one of {list(self.options())}, got {value!r}")
        before, self._sharing.batch_samples = self._sharing.batch_samples, value

        def undo() -> None:
            self._sharing.batch_samples = before

        return undo

    def is_applied(self, value: Value) -> bool:
        """Whether that is asked for."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: a larger share is cut into more micro-batches, if it has to be."""
        return None
