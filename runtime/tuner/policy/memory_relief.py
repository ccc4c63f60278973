"""What is given up for memory before it runs out. There is no time to try it: it is done."""

from __future__ import annotations

import logging

from ....metrics.thresholds import OOM_RISK_HIGH
from .experiment import Conclusion
from .options import TunerOptions
from .search import Search
from .types import Configuration, StepTime

logger = logging.getLogger(__name__)

RELIEF_STEPS = 5  # after a change, until its effect can be foreseen


class MemoryRelief:
    """Of one run.

    Args:
        search: Finds what could be given up.
        rules: The user's.
    """

    def __init__(self, search: Search, rules: TunerOptions) -> None:
        self._search, self._rules = search, rules
        self._rest = 0

    def is_due(self, step: StepTime) -> bool:
        """Whether a window shows that memory will soon run out, and something may be done."""
        self._rest = max(0, self._rest - 1)
        is_due = self._rules.acts and not self._rest and step.oom_risk >= OOM_RISK_HIGH
        if is_due:
            self._rest = RELIEF_STEPS
        return is_due

    def find(self, step: StepTime, configuration: Configuration) -> Conclusion | None:
        """Return what to give up; None if nothing is left.

        Args:
            step: The window that shows it.
            configuration: What it was run with.
        """
        situation = self._search.emergency(step, configuration)
        experiment = next(self._search.reliefs(situation), None)
        if experiment is None:
            logger.warning("memory will soon run out, and there is nothing left to give up for it")
            self._rest = self._rules.soak_steps
            return None
        reason = f"the risk of running out of memory was {step.oom_risk:.0%}"
        return experiment.concluded("accepted", reason)
