"""What a run is besides its engine: plain data, of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ....errors import CheckpointError
from .plain import from_serializable, to_serializable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run between two windows, apart from weights, optimizer and schedule, which the engine has.

    Attributes:
        steps: Windows committed.
        samples: Samples committed, of all ranks together.
        config: The DeepSpeed configuration in force, which is another than the caller's after an
            engine was rebuilt.
        rebuilt: Whether that is so.
        micro_batch_plan: Samples per micro-batch, what failed at which length, and whatever else
            decides how the next window is cut.
        weight_exponent: The power of two over which gradients are accumulated.
        rng: Python's, numpy's and torch's generators of this rank.
        data: Where this rank stands in its data: a loader's `state_dict()`.
        codec: What compression of gradients owes on this rank.
        client: The caller's own.
    """

    steps: int
    samples: int
    config: Mapping[str, Any]
    rebuilt: bool = False
    micro_batch_plan: Mapping[str, Any] = field(default_factory=dict)
    weight_exponent: int = 0
    rng: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    codec: Mapping[str, Any] | None = None
    client: Any = None

    def to_plain(self) -> dict[str, Any]:
        """Return a copy on the host, fit to be written.

        Raises:
            CheckpointError: Something in it is no plain data.
        """
        return {name: to_serializable(getattr(self, name), name) for name in _NAMES}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> RunState:
        """Return the state that was written.

        Raises:
            CheckpointError: It was written by another version.
        """
        if values.keys() != set(_NAMES):
            odd = ", ".join(sorted(set(_NAMES).symmetric_difference(values)))
            raise CheckpointError(
                f"it was written by another version of zerowatch, which differs in {odd}; "
                "load it with that version"
            )
        return RunState(**{name: from_serializable(values[name]) for name in _NAMES})


_NAMES = tuple(each.name for each in fields(RunState))
