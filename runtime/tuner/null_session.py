"""What stands in for a tuning where there is none, so that a run need not ask."""

from __future__ import annotations

from ..trainer.window.step_result import StepResult


class NullTunerSession:
    """Has the face of a tuning, for a run that is not to be tuned, or that nobody watches."""

    @property
    def is_on_trial(self) -> bool:
        """Whether the last window was run with something that may be taken back."""
        return False

    def before_window(self) -> None:
        """Do nothing."""

    def window_ended(self, result: StepResult) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def interrupted(self) -> None:
        """Do nothing."""

    def changed(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
