"""What the hands on one knob can do; every rank moves them alike, between two windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..policy.types import Undo, Value


class ReadableKnob(Protocol):
    """One knob on this rank, to be read.

    Attributes:
        name: As in `tuner/registry.py`.
    """

    name: str

    def unsupported_reason(self) -> str | None:
        """Say why this job has no such knob as it runs now; None where it has."""

    def get(self) -> Value:
        """Return its value now."""

    def options(self) -> Sequence[Value]:
        """Return what it could be set to from here, in order, the present value included."""

    def is_applied(self, value: Value) -> bool:
        """Whether the job really works with this value."""

    def memory_bytes(self, value: Value) -> int | None:
        """Return what this value needs more than the present one, less if negative, if known."""


class WritableKnob(ReadableKnob, Protocol):
    """One that is turned by itself."""

    def turn(self, value: Value) -> Undo:
        """Set it, and return what puts back what was there.

        Raises:
            ZerowatchError: Nothing was changed.
        """
