"""Keeps the outcome of each incident in a file as soon as it is known."""

from __future__ import annotations

import json
from pathlib import Path

from bench.incidents.incident_outcome import BY_NAME, Outcome

from zerowatch.metrics.atomic_file import atomic_write

RESULTS = Path(__file__).parents[3] / ".build" / "incidents.jsonl"


def load(path: Path = RESULTS) -> dict[str, Outcome]:
    """Return the kept outcomes by incident, in the order of the lists; empty without a file.

    Raises:
        ValueError: Another version of the bench wrote the file.
    """
    if not path.exists():
        return {}
    try:
        kept = [Outcome.from_json(json.loads(line)) for line in path.read_text().splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is of another version of this bench: remove it") from error
    by_name = {outcome.name: outcome for outcome in kept}
    return {name: by_name[name] for name in BY_NAME if name in by_name}


def keep(outcome: Outcome, path: Path = RESULTS) -> None:
    """Add an outcome, or replace an earlier one of the same incident."""
    kept = load(path) | {outcome.name: outcome}
    lines = [json.dumps(each.as_json()) + "\n" for each in kept.values()]
    atomic_write(path, "".join(lines))


def put_aside(path: Path = RESULTS) -> None:
    """Rename the file, so that the next outcomes are in a file of their own."""
    if path.exists():
        path.replace(path.with_suffix(".earlier.jsonl"))
