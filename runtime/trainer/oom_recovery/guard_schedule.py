"""When the ranks vote before each collective: while an out-of-memory error is to be expected. Pure.

All ranks must decide alike, so everything in here is agreed between them beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CLEAN_WINDOWS = 3
LOW_HEADROOM_RATIO = 0.08  # of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSchedule:
    """Whether the next window is guarded, and what that depends on.

    A new one, as after a start or restart, is armed: nothing is known yet of what fits.

    Attributes:
        windows_left: Clean windows until the guard is disarmed; 0 while it is.
        longest: The longest batch that ever came to its end; 0 before the first.
    """

    windows_left: int = CLEAN_WINDOWS
    longest: int = 0

    @property
    def is_armed(self) -> bool:
        """Whether to vote before each collective of the window."""
        return self.windows_left > 0

    def before(self, *, longest: int, asked: bool) -> GuardSchedule:
        """Return what holds for a window about to begin.

        Args:
            longest: Length of its longest batch over all ranks.
            asked: Whether a rank asks for it: its memory is changed, or its headroom low.
        """
        if asked or longest > self.longest:
            return replace(self, windows_left=CLEAN_WINDOWS)
        return self

    def after_clean(self, *, longest: int) -> GuardSchedule:
        """Return what holds after a window in which nobody ran out."""
        return GuardSchedule(
            windows_left=max(0, self.windows_left - 1), longest=max(self.longest, longest)
        )

    def after_change(self) -> GuardSchedule:
        """Return what holds after another size of micro-batches, or anything that takes memory."""
        return replace(self, windows_left=CLEAN_WINDOWS)


def asks(*, is_changed: bool, headroom_bytes: float | None, limit_bytes: float | None) -> bool:
    """Whether a rank asks for the guard, by what it alone knows.

    Args:
        is_changed: Something that matters to memory was changed since the last window.
        headroom_bytes: Limit less the predicted next peak; None where that is not known yet.
        limit_bytes: What the process, or torch on the device, may use; None without one.
    """
    if is_changed:
        return True
    if headroom_bytes is None or not limit_bytes:
        return False
    return headroom_bytes < LOW_HEADROOM_RATIO * limit_bytes
