"""What was found out about a job, kept for its next run: one JSON file for each job."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ...metrics.whole_file import write_whole
from .words import Configuration, Value

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
MAX_CONTEXTS = 16  # of one job; the oldest make room

Denied = frozenset[tuple[str, Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What a job came to in one context.

    Attributes:
        configuration: The whole one that proved best; empty if none did.
        denied: Knobs with values that failed or did harm.
        on_trial: What is being tried, or was when the run died.
    """

    configuration: Configuration
    denied: Denied
    on_trial: Configuration = field(default_factory=dict)


def job_key(facts: Mapping[str, object]) -> str:
    """Return a short name of a job: the same for equal facts, such as shapes, ranks, versions."""
    text = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.sha256(text).hexdigest()[:16]


class VerdictStore:
    """Keeps them in a folder. A disk that fails costs what is remembered, and never the run.

    Args:
        folder: Where; None to remember nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: str) -> Mapping[str, Remembered]:
        """Return what is known of a job, by context; nothing where the file is damaged."""
        path = self._path(key)
        if path is None:
            return {}
        try:
            return _read(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("what %s remembers is left out: %s: %s", path, _kind(error), error)
            return {}

    def remember(self, key: str, context: str, remembered: Remembered) -> None:
        """Keep what a job came to in one context, in the place of what was known of it."""
        path = self._path(key)
        if path is None:
            return
        known = {name: each for name, each in self.load(key).items() if name != context}
        known[context] = remembered
        newest = dict(list(known.items())[-MAX_CONTEXTS:])
        try:
            write_whole(path, _text(newest))
        except OSError as error:
            logger.warning("cannot remember this job for its next run in %s: %s", path, error)

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{key}.json"


def _text(contexts: Mapping[str, Remembered]) -> str:
    told = {
        name: {
            "configuration": each.configuration,
            "denied": sorted(each.denied, key=repr),
            "on_trial": each.on_trial,
        }
        for name, each in contexts.items()
    }
    data = {"schema": SCHEMA_VERSION, "contexts": told}
    return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n"


def _read(text: bytes) -> dict[str, Remembered]:
    data: Any = orjson.loads(text)
    if data["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {data['schema']!r} is not {SCHEMA_VERSION}")
    return {
        str(name): Remembered(
            configuration=_configuration(told["configuration"]),
            denied=frozenset((str(knob), _value(each)) for knob, each in told["denied"]),
            on_trial=_configuration(told["on_trial"]),
        )
        for name, told in data["contexts"].items()
    }


def _configuration(found: Any) -> Configuration:
    return {str(knob): _value(each) for knob, each in found.items()}


def _value(found: Any) -> Value:
    if found is None or isinstance(found, bool | int | str):
        return found
    raise TypeError(f"{found!r} is no value of a knob")


def _kind(error: Exception) -> str:
    return type(error).__name__
