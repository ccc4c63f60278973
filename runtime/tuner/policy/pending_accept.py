"""What is to stay, from the verdict on until all ranks work with it."""

from __future__ import annotations

from dataclasses import replace

from .configuration_state import ConfigurationState
from .experiment import Conclusion
from .options import TunerListener
from .search import Search
from .types import Verdict


class PendingAccept:
    """Of one configuration at a time.

    Args:
        course: Of the job.
        search: Learns what came of it.
        listener: Is told.
    """

    def __init__(self, course: ConfigurationState, search: Search, listener: TunerListener) -> None:
        self._course, self._search, self._listener = course, search, listener
        self._conclusion: Conclusion | None = None

    @property
    def is_due(self) -> bool:
        """Whether something is to stay that is not yet known to be good."""
        return self._conclusion is not None

    def begin(self, conclusion: Conclusion) -> None:
        """Have the job go there, to stay."""
        self._conclusion = conclusion
        self._course.set(conclusion.target, conclusion.proposal.why)

    def end(self) -> bool:
        """Take it for good if the job works with it; return whether that is so."""
        conclusion = self._conclusion
        if conclusion is None or not self._course.is_there:
            return False
        self._conclusion = None
        self._course.stay()
        self._search.adopted(conclusion, self._course.known_good)
        self._listener.concluded(conclusion)
        return True

    def fail(self, reason: str) -> None:
        """Take it that it could not be set."""
        if self._conclusion is not None:
            self._search.failed(self._conclusion.proposal.changes)
            self._drop("rejected", f"it could not be set: {reason}")

    def leave(self) -> None:
        """Take it that something else came before it was in use."""
        self._drop("rolled_back", "something else came between")

    def _drop(self, verdict: Verdict, reason: str) -> None:
        if self._conclusion is not None:
            dropped = replace(self._conclusion, verdict=verdict, reason=reason)
            self._conclusion = None
            self._listener.concluded(dropped)
