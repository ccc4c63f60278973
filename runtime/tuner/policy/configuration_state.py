"""Tracks the configurations of a job: in use, wanted, and known to be good."""

from __future__ import annotations

from dataclasses import replace

from .controller_interface import TunerListener
from .knob_registry import KNOBS
from .policy_types import Configuration, KnobSetter, SwitchRequest, Verdict
from .trial import Decision
from .trial_search import TrialSearch

_LAYOUT = frozenset(spec.name for spec in KNOBS if spec.apply_mode == "rebuild")


class ConfigurationState:
    """Tracks three configurations of one job. Each configuration has every knob.

    Args:
        knobs: Knobs of rank 0, which are read but not set.
        listener: Receives each change of the configuration in use.

    Attributes:
        known_good: Configuration that the job uses without a trial.
        in_use: Configuration that all ranks use now.
        wanted: Configuration that the next switch leads to.
        reason: Why this configuration is wanted, as half a sentence for messages.
    """

    def __init__(self, knobs: KnobSetter, listener: TunerListener) -> None:
        self._knobs, self._listener = knobs, listener
        self.reason = ""
        self.known_good: Configuration
        self.in_use: Configuration
        self.wanted: Configuration
        # Read back after the last change. Some values read differently than they were set: at ZeRO
        # stage 0, the bucket size reads as 500 million elements.
        self._read: Configuration
        self.reset()

    def reset(self) -> None:
        """Treat the present values of the knobs as known to be good."""
        self.known_good = self.wanted = dict(self._knobs.values())
        self.on_applied(self.wanted)

    @property
    def is_settled(self) -> bool:
        """Whether the job uses the wanted configuration."""
        return self.wanted == self.in_use

    @property
    def is_on_trial(self) -> bool:
        """Whether the job uses a configuration that is not known to be good."""
        return self.in_use != self.known_good

    def request(self, wanted: Configuration, reason: str) -> None:
        """Set the wanted configuration."""
        self.wanted, self.reason = wanted, reason

    def pending_switch(self) -> SwitchRequest | None:
        """Return the switch to the wanted configuration; None if that configuration is in use."""
        if self.is_settled:
            return None
        return SwitchRequest(
            target=self.wanted, reason=self.reason, checked=self.wanted != self.known_good
        )

    def on_applied(self, target: Configuration) -> None:
        """Record that the job uses a configuration now."""
        self.in_use = target
        self._read = dict(self._knobs.values())
        self._listener.on_configuration(target)

    def adopt_external(self) -> Configuration | None:
        """Keep values that others changed, such as memory savings after an out-of-memory error.

        If a layout on trial was replaced by another layout, nothing is kept, because the trial is
        rolled back to the layout that was known to be good.

        Returns:
            The values before the changes; None if nothing was changed.
        """
        changed = {
            knob: value
            for knob, value in self._knobs.values().items()
            if knob not in self._read or self._read[knob] != value
        }
        if not changed:
            return None
        replaced = {knob: self._read[knob] for knob in changed.keys() & self._read.keys()}
        on_trial = {knob for knob in _LAYOUT if self.in_use.get(knob) != self.known_good.get(knob)}
        if not on_trial or not changed.keys() & _LAYOUT:
            self.known_good = {**self.known_good, **changed}
            self.wanted = {**self.wanted, **changed}
        self.on_applied({**self.in_use, **changed})
        return replaced

    def commit(self) -> None:
        """Treat the configuration in use as known to be good.

        A rebuilt engine may have other knobs than the engine before. Values of knobs that the new
        engine lacks are kept for a rollback.
        """
        self.wanted = {**self.in_use, **self._knobs.values()}
        self.known_good = self.wanted
        self.on_applied(self.wanted)


class PendingAccept:
    """Holds at most one accepted configuration, from the verdict until all ranks use it.

    Args:
        configuration: Configurations of the job.
        search: Receives the result.
        listener: Receives the decision.
    """

    def __init__(
        self, configuration: ConfigurationState, search: TrialSearch, listener: TunerListener
    ) -> None:
        self._configuration, self._search, self._listener = configuration, search, listener
        self._decision: Decision | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a configuration is accepted and not yet committed."""
        return self._decision is not None

    def start(self, decision: Decision) -> None:
        """Request the accepted configuration."""
        self._decision = decision
        self._configuration.request(decision.target, decision.proposal.reason)

    def complete(self) -> bool:
        """Commit the configuration if the job uses it; return whether it does."""
        decision = self._decision
        if decision is None or not self._configuration.is_settled:
            return False
        self._decision = None
        self._configuration.commit()
        self._search.on_accepted(decision, self._configuration.known_good)
        self._listener.on_decision(decision)
        return True

    def fail(self, reason: str, *, refused: bool = False) -> None:
        """Reject the configuration, because it could not be set.

        Args:
            reason: Why not, as half a sentence.
            refused: Whether a rank refused the configuration before anything was changed. If so,
                the configuration is rejected for this run only.
        """
        if self._decision is not None:
            self._search.on_failed(self._decision.proposal.changes, refused=refused)
            self._drop("rejected", f"it could not be set: {reason}")

    def drain(self) -> Decision | None:
        """Return the pending decision, and clear it; None if no decision is pending."""
        decision, self._decision = self._decision, None
        return decision

    def abandon(self) -> None:
        """Roll the configuration back, because something else interrupted the switch."""
        self._drop("rolled_back", "interrupted before it was in use")

    def _drop(self, verdict: Verdict, reason: str) -> None:
        if self._decision is not None:
            dropped = replace(self._decision, verdict=verdict, reason=reason)
            self._decision = None
            self._listener.on_decision(dropped)
