"""Causes faults of a run one after another, and records the alerts that each raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lab.alerting import AlertHistory, Spell

PATIENCE_SECONDS = 90.0


@dataclass
class Fault:
    """One alert that a fault should raise; times are by the monotonic clock.

    Attributes:
        labels: By which the alert is known to be of this fault.
        ended: When the fault was taken away; None while it is there.
    """

    alert: str
    labels: Mapping[str, str]
    history: AlertHistory
    began: float
    ended: float | None = None

    @property
    def spell(self) -> Spell | None:
        return self.history.find(self.alert, since=self.began, **self.labels)

    @property
    def raised_seconds(self) -> float | None:
        """Seconds from the fault's beginning until Alertmanager held the alert."""
        return None if self.spell is None else self.spell.seen - self.began

    @property
    def resolved_seconds(self) -> float | None:
        """Seconds from the fault's end until Alertmanager no longer held the alert."""
        gone = None if self.spell is None else self.spell.gone
        return None if gone is None or self.ended is None else gone - self.ended

    def row(self, since: float) -> str:
        """Write what happened when, as a line of a table; `since` is when the story began."""
        raised, resolved = (
            "-" if seconds is None else f"{seconds:.1f} s"
            for seconds in (self.raised_seconds, self.resolved_seconds)
        )
        text = "" if self.spell is None else self.spell.annotations["description"]
        figures = f"{self.began - since:6.0f} s {raised:>8} {resolved:>8}"
        return f"{self.alert:24} {figures}  {' '.join(text.split())[:90]}"


@dataclass
class Story:
    """Begins and ends faults, and waits for their alerts.

    A wait that is in vain ends nothing: the fault then has no spell, or one without an end.
    """

    history: AlertHistory
    faults: dict[str, Fault] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def begin(self, act: Callable[[], object], *alerts: str, **labels: str) -> None:
        """Cause a fault that these alerts should report."""
        self.history.poll()
        now = time.monotonic()
        for alert in alerts:
            self.faults[alert] = Fault(alert, labels, self.history, began=now)
        act()

    def end(self, act: Callable[[], object], *alerts: str) -> None:
        """Wait until these alerts are raised, and undo their fault."""
        self.await_raised(*alerts)
        act()
        now = time.monotonic()
        for alert in alerts:
            self.faults[alert].ended = now

    def await_raised(self, *alerts: str) -> None:
        faults = [self.faults[alert] for alert in alerts]
        self._wait(faults, lambda fault: fault.spell is not None, lambda fault: fault.began)

    def await_resolved(self, *alerts: str) -> None:
        faults = [self.faults[alert] for alert in alerts if self.faults[alert].spell]
        self._wait(
            faults, lambda fault: fault.resolved_seconds is not None, lambda fault: fault.ended
        )

    def await_calm(self, alert: str) -> None:
        """Wait until an alert is not raised by any fault."""
        self.history.wait(lambda: not self.history.lasts(alert), PATIENCE_SECONDS)

    def pass_time(self, seconds: float) -> None:
        self.history.wait(lambda: False, seconds)

    def table(self) -> str:
        """Write, by alert, when its fault began, and how long after that it was raised.

        And how long after the fault's end the alert was over.
        """
        head = f"{'alert':24} {'begins':>8} {'raised':>8} {'resolved':>8}  what it says"
        return "\n".join([head, *(fault.row(self.began) for fault in self.faults.values())])

    def _wait(
        self,
        faults: list[Fault],
        condition: Callable[[Fault], bool],
        since: Callable[[Fault], float | None],
    ) -> None:
        """Wait until the condition holds for all; patience begins with the last `since`."""
        begun = max((since(fault) or time.monotonic() for fault in faults), default=0.0)
        left = begun + PATIENCE_SECONDS - time.monotonic()
        self.history.wait(lambda: all(map(condition, faults)), left)
