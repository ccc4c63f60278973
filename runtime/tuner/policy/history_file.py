"""What was found out about a job, kept for its next run: a JSON file for each job."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ....metrics.atomic_file import atomic_write
from .types import Configuration, Value

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_CONTEXTS = 16  # of one job; the oldest make room
TRIAL = ".trial.json"  # ends the name of a file that says what is on trial in some process

T = TypeVar("T")

Denied = frozenset[tuple[str, Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """What a job came to in one context.

    Attributes:
        configuration: The whole one that proved best; empty if none did.
        denied: Knobs with values that did not help, or did harm.
    """

    configuration: Configuration
    denied: Denied


def is_within(changes: Configuration, configuration: Configuration) -> bool:
    """Whether a configuration has all these values."""
    return all(
        knob in configuration and configuration[knob] == value for knob, value in changes.items()
    )


def job_fingerprint(facts: Mapping[str, object]) -> str:
    """Return a short name of a job: the same for equal facts, such as shapes, ranks, versions."""
    text = orjson.dumps(facts, option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.sha256(text).hexdigest()[:16]


class HistoryFile:
    """What is kept of one job. A disk that fails costs what is remembered, and never the run.

    Args:
        folder: Where; None to remember nothing.
        key: Names the job.
        owner: Names this process among all that may run that job, in a file's name.
        is_gone: Whether the process of such a name has ended.
    """

    def __init__(
        self, folder: Path | None, key: str, *, owner: str, is_gone: Callable[[str], bool]
    ) -> None:
        self._folder, self._key, self._owner, self._is_gone = folder, key, owner, is_gone

    def load(self) -> Mapping[str, HistoryEntry]:
        """Return what is known of the job, by context; nothing where the file is damaged."""
        return self._read(f"{self._key}.json", _remembered) or {}

    def died_of(self) -> Sequence[Configuration]:
        """Return what was on trial in runs that ended with it; each is told once."""
        found: list[Configuration] = []
        for path in self._folder.glob(f"{self._key}.*{TRIAL}") if self._folder else ():
            owner = path.name[len(self._key) + 1 : -len(TRIAL)]
            if owner == self._owner or self._is_gone(owner):
                if changes := self._read(path.name, _on_trial):
                    found.append(changes)
                with suppress(OSError):
                    path.unlink()
        return found

    def remember(self, context: str, remembered: HistoryEntry) -> None:
        """Keep what the job came to in one context, in the place of what was known of it."""
        known = {name: each for name, each in self.load().items() if name != context}
        known[context] = remembered
        self._write(f"{self._key}.json", _text(dict(list(known.items())[-MAX_CONTEXTS:])))

    def on_trial(self, changes: Configuration) -> None:
        """Keep what is on trial; nothing if that is empty."""
        name = f"{self._key}.{self._owner}{TRIAL}"
        if changes:
            self._write(name, _json({"schema": SCHEMA_VERSION, "on_trial": changes}))
        elif self._folder is not None:
            with suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        path = self._folder / name
        try:
            atomic_write(path, text)
        except OSError as error:
            logger.warning("cannot remember this job for its next run in %s: %s", path, error)

    def _read(self, name: str, parse: Callable[[Any], T]) -> T | None:
        """Return what is in a file; None if there is none, or it is damaged."""
        if self._folder is None:
            return None
        path = self._folder / name
        try:
            data: Any = orjson.loads(path.read_bytes())
            if data["schema"] != SCHEMA_VERSION:
                raise ValueError(f"schema {data['schema']!r} is not {SCHEMA_VERSION}")
            return parse(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            logger.warning("what %s remembers is left out: %s: %s", path, kind, error)
            return None


def _text(contexts: Mapping[str, HistoryEntry]) -> str:
    told = {
        name: {"configuration": each.configuration, "denied": sorted(each.denied, key=repr)}
        for name, each in contexts.items()
    }
    return _json({"schema": SCHEMA_VERSION, "contexts": told})


def _json(data: object) -> str:
    return orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n"


def _remembered(data: Any) -> dict[str, HistoryEntry]:
    return {
        str(name): HistoryEntry(
            configuration=_configuration(told["configuration"]),
            denied=frozenset((str(knob), _value(each)) for knob, each in told["denied"]),
        )
        for name, told in data["contexts"].items()
    }


def _on_trial(data: Any) -> Configuration:
    return _configuration(data["on_trial"])


def _configuration(found: Any) -> Configuration:
    return {str(knob): _value(each) for knob, each in found.items()}


def _value(found: Any) -> Value:
    if found is None or isinstance(found, bool | int | str):
        return found
    raise TypeError(f"{found!r} is no value of a knob")
