"""Options of a bench: steps and size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`steps` are timed steps of each arm of `overhead`; `quick` tries everything at tiny sizes."""

    steps: int
    quick: bool
