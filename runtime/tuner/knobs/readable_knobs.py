"""What is read of all dials at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from ..policy.types import Configuration, Value
from .knob import ReadableKnob

logger = logging.getLogger(__name__)


def read_values(dials: Iterable[ReadableKnob]) -> dict[str, Value]:
    """Return the value of each knob that is there."""
    return {dial.name: dial.get() for dial in dials if dial.unsupported_reason() is None}


def read_options(dials: Iterable[ReadableKnob], told: set[str]) -> Mapping[str, Sequence[Value]]:
    """Return what each knob could be set to; of one that is absent the log says once why.

    Args:
        dials: All.
        told: Names of which it was said; added to.
    """
    found: dict[str, Sequence[Value]] = {}
    for dial in dials:
        reason = dial.unsupported_reason()
        options = () if reason is not None else tuple(dial.options())
        if len(options) > 1:
            found[dial.name] = options
        elif dial.name not in told:
            told.add(dial.name)
            logger.info("%s is not tuned: %s", dial.name, reason or "here it has one value only")
    return found


def unknown_or_missing(dials: Sequence[ReadableKnob], target: Configuration) -> str | None:
    """Say so if a target names a knob that nobody knows, or changes none but what is not there."""
    by_name = {dial.name: dial for dial in dials}
    unknown = target.keys() - by_name.keys()
    if unknown:
        return f"there is no knob {', '.join(sorted(unknown))}"
    gone = [(name, by_name[name].unsupported_reason()) for name in target]
    missing = [f"{name}: {reason}" for name, reason in gone if reason is not None]
    present = [by_name[name] for name, reason in gone if reason is None]
    if missing and all(dial.is_applied(target[dial.name]) for dial in present):
        return missing[0]
    return None


def all_applied(dials: Sequence[ReadableKnob], target: Configuration) -> bool:
    """Whether all knobs of a target that are there read back."""
    by_name = {dial.name: dial for dial in dials}
    return all(
        name in by_name
        and (by_name[name].unsupported_reason() is not None or by_name[name].is_applied(value))
        for name, value in target.items()
    )
