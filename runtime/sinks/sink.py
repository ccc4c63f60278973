"""Defines a sink: one destination of a run's values, such as a run of W&B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRun:
    """The run whose values a sink gets.

    Attributes:
        run_id: The id of the run.
        folder: The run folder. None if no run log is written.
    """

    run_id: str
    folder: Path | None


class Sink(Protocol):
    """A destination of the values of rank 0: those of the step record and of `/metrics`.

    `Watch.add_sink` adds one. zerowatch calls the methods on a thread that only sinks use, `open`
    before the first values. A method may block or raise: training and monitoring go on. After an
    error the sink is called again later, and the values in between are missing.

    Examples:
        >>> class Console:
        ...     def open(self, run):
        ...         print(run.run_id)
        ...
        ...     def write(self, values, *, step, unix_seconds):
        ...         print(step, values["zerowatch/loss"])
        ...
        ...     def close(self, *, failed):
        ...         print("failed" if failed else "ended")
        >>> engine.watch.add_sink(Console())
    """

    def open(self, run: SinkRun) -> None:
        """Open the destination. Called again later if it raised."""

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Write the values of one step.

        Args:
            values: Finite values by name, such as "zerowatch/loss". The same names need not be
                there in each step.
            step: The optimizer step.
            unix_seconds: When the step ended.
        """

    def close(self, *, failed: bool) -> None:
        """Write what is pending and close the destination.

        Args:
            failed: Whether the run ended with an exception.
        """
