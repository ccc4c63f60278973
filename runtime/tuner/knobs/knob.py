"""Defines the base classes of knobs on one rank, and the set of all knobs of a job."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from ....errors import ZerowatchError
from ...common.gil_pauses import let_training_run
from ...common.undo import Undo
from ..policy.knob_registry import KnobSpec
from ..policy.policy_types import Configuration, Value

logger = logging.getLogger(__name__)


class ReadableKnob(ABC):
    """Reads one knob on this rank.

    Attributes:
        spec: The knob's data.
    """

    spec: KnobSpec

    @property
    def name(self) -> str:
        """The knob's name."""
        return self.spec.name

    def unsupported_reason(self) -> str | None:
        """Return why this job does not have the knob at present; None if the job has it."""
        return None

    @abstractmethod
    def get(self) -> Value:
        """Return the value in use."""

    @abstractmethod
    def options(self) -> Sequence[Value]:
        """Return the possible values in order, including the one in use."""

    def is_applied(self, value: Value) -> bool:
        """Whether the job uses this value, read back from where it takes effect."""
        return value == self.get()

    def memory_bytes(self, value: Value) -> int | None:
        """Return the bytes that a value needs beyond the value in use; None if unknown."""
        return None


class WritableKnob(ReadableKnob):
    """Reads and sets one knob on this rank, independently of other knobs."""

    @abstractmethod
    def set(self, value: Value) -> Undo:
        """Set the value on this rank, and return the undo.

        Every rank sets the same value between two windows. A single rank may fail, so this method
        must not communicate with other ranks.

        Raises:
            ZerowatchError: Nothing was changed.
        """


class SwitchKnob(WritableKnob):
    """Switches a knob on or off."""

    def options(self) -> Sequence[Value]:
        """Return both values."""
        return (False, True)

    def set(self, value: Value) -> Undo:
        """Switch it, and return the undo.

        Raises:
            ZerowatchError: The value is neither True nor False, or the knob cannot be switched.
        """
        if not isinstance(value, bool):
            raise ZerowatchError(f"{self.name} is True or False, got {value!r}")
        return self._switch(on=value)

    @abstractmethod
    def _switch(self, *, on: bool) -> Undo: ...


class KnobSet:
    """Reads and sets all knobs of a job on this rank."""

    def __init__(self, knobs: Sequence[ReadableKnob]) -> None:
        self._by_name = {knob.name: knob for knob in knobs}
        self._logged: set[str] = set()

    def values(self) -> Configuration:
        """Return the value of each available knob."""
        found: dict[str, Value] = {}
        for knob in self._available():
            found[knob.name] = knob.get()
            let_training_run()
        return found

    def options(self) -> Mapping[str, Sequence[Value]]:
        """Return the values of each knob with several values. Log once why others are fixed."""
        options_by_name: dict[str, Sequence[Value]] = {}
        for name, knob in self._by_name.items():
            reason = knob.unsupported_reason()
            options = () if reason is not None else tuple(knob.options())
            let_training_run()
            if len(options) > 1:
                options_by_name[name] = options
            elif name not in self._logged:
                self._logged.add(name)
                logger.info("%s is not tuned: %s", name, reason or "it has only one value here")
        return options_by_name

    def unsupported_reason(self, target: Configuration) -> str | None:
        """Return why a target has an unknown knob, or changes only unavailable ones; else None."""
        unknown = target.keys() - self._by_name.keys()
        if unknown:
            return f"there is no knob {', '.join(sorted(unknown))}"
        reasons = {name: self._by_name[name].unsupported_reason() for name in target}
        missing = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
        present = [self._by_name[name] for name, reason in reasons.items() if reason is None]
        if missing and all(knob.is_applied(target[knob.name]) for knob in present):
            return missing[0]
        return None

    def all_applied(self, target: Configuration) -> bool:
        """Whether all available knobs of a target have its values."""
        return all(name in self._by_name for name in target) and all(
            knob.is_applied(target[knob.name]) for knob in self._available() if knob.name in target
        )

    def memory_bytes(self, target: Configuration) -> int:
        """Return the additional bytes that a target needs, as far as they are known."""
        return sum(
            knob.memory_bytes(target[knob.name]) or 0
            for knob in self._available()
            if knob.name in target
        )

    def _available(self) -> Iterator[ReadableKnob]:
        return (knob for knob in self._by_name.values() if knob.unsupported_reason() is None)
