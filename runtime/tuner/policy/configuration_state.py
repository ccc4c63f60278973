"""Where a job stands, and where it is to go: three configurations."""

from __future__ import annotations

from collections.abc import Callable

from .types import Configuration, KnobSetter, Order


class ConfigurationState:
    """Of one run.

    Args:
        hands: Rank 0's; asked only.
        tell: Called with what the job works with, whenever that changes.

    Attributes:
        known_good: What the job works with when nothing is on trial.
        in_use: What it works with now.
        wanted: What it is to work with.
        why: Half a sentence for people.
    """

    def __init__(self, hands: KnobSetter, tell: Callable[[Configuration], object]) -> None:
        self._hands, self._tell = hands, tell
        self.why = ""
        self.known_good: Configuration
        self.in_use: Configuration
        self.wanted: Configuration
        self.begin()

    def begin(self) -> None:
        """Take what the hands work with for what is good."""
        self.known_good = self.in_use = self.wanted = dict(self._hands.values())
        self._tell(self.in_use)

    @property
    def is_there(self) -> bool:
        """Whether the job works with what is wanted."""
        return self.wanted == self.in_use

    @property
    def is_on_trial(self) -> bool:
        """Whether the job works with something else than what is known to be good."""
        return self.in_use != self.known_good

    def arrive(self, target: Configuration) -> None:
        """Take it that the job works with this now."""
        self.in_use = target
        self._tell(target)

    def follow(self) -> None:
        """Take for good what others changed, such as what was given up as memory ran out."""
        now = self._hands.values()
        changed = {
            knob: value
            for knob, value in now.items()
            if knob not in self.in_use or self.in_use[knob] != value
        }
        if changed:
            self.known_good = {**self.known_good, **changed}
            self.wanted = {**self.wanted, **changed}
            self.arrive({**self.in_use, **changed})

    def order(self) -> Order | None:
        """Return what all ranks are to do, if anything."""
        if self.is_there:
            return None
        return Order(target=self.wanted, why=self.why, checked=self.wanted != self.known_good)

    def set(self, wanted: Configuration, why: str) -> None:
        """Have the job go there."""
        self.wanted, self.why = wanted, why

    def stay(self) -> None:
        """Take what is in use for good.

        Another engine may have other knobs; those that are gone are kept for the way back.
        """
        self.in_use = self.wanted = {**self.in_use, **self._hands.values()}
        self.known_good = self.in_use
