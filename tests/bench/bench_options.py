"""Options of a bench: steps and size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a bench measures, and how long.

    Attributes:
        steps: Timed steps of each arm of `overhead`.
        quick: Whether to try everything at tiny sizes.
        only: The incidents to plant; all if empty.
        resume: Whether to run only the incidents or cases that have no result yet.
        show: Whether to print the results of incidents that there are, and to plant none.
        minutes: Length of the training in `chaos`.
    """

    steps: int
    quick: bool
    only: tuple[str, ...] = ()
    resume: bool = False
    show: bool = False
    minutes: float = 30.0
