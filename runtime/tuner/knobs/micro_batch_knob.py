"""How many samples a micro-batch holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....errors import BatchError
from ...trainer.window_runner import WindowRunner
from ..policy.types import Undo, Value
from .candidate_sizes import micro_batch_sizes


class MicroBatchKnob:
    """Sets what `TrainingRun.set_micro_batch` does; the batch as a whole stays.

    Args:
        windows: Of the run.
        largest_share: Returns the samples of the largest share of any rank in the last window,
            the same on all ranks; 0 before the first.
    """

    name = "micro_batch_samples"

    def __init__(self, windows: WindowRunner, largest_share: Callable[[], int]) -> None:
        self._windows, self._largest_share = windows, largest_share

    def unsupported_reason(self) -> str | None:
        """Say so where ranks were given different sizes: one for all would undo that."""
        opened = self._windows.opened
        if opened is not None and len(set(opened.share.wanted)) > 1:
            return "ranks were given different sizes"
        return None

    def get(self) -> int:
        """Return the samples as asked for; where memory ran out, fewer are taken."""
        return self._windows.micro_batch_samples

    def options(self) -> Sequence[Value]:
        """Return the sizes that cut the largest share into 1, 2, 4 and so on."""
        return micro_batch_sizes(self._largest_share(), self.get())

    def turn(self, value: Value) -> Undo:
        """Set it.

        Raises:
            BatchError: That is no size.
        """
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BatchError(f"a micro-batch holds 1 sample or more, got {value!r}")
        before, self._windows.micro_batch_samples = self.get(), value

        def undo() -> None:
            self._windows.micro_batch_samples = before

        return undo

    def is_applied(self, value: Value) -> bool:
        """Whether that is asked for."""
        return value == self.get()

    def memory_bytes(self, _: Value) -> int | None:
        """Return None: `memory.py` draws a line through what was measured."""
        return None
