"""Writes the tuner's decisions as flat records to `runs/<run_id>/decisions.jsonl`.

The file has one JSON object per line. `decision_line` defines the schema. Raise SCHEMA_VERSION for
a change that an older reader would misread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import orjson

from ....metrics.atomic_file import open_log
from .diagnose import context_of
from .policy_types import Configuration, Mode, Numerics, Symptom, Value, Verdict
from .trial import Decision

logger = logging.getLogger(__name__)

DECISIONS_FILE = "decisions.jsonl"
SCHEMA_VERSION = 1
SEVERAL = "several"  # stands for the knob's name if several knobs change


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Value of one knob before and after."""

    knob: str
    before: Value
    after: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision as written to `decisions.jsonl` and to the log, with its place in the run.

    Attributes:
        number: Number of the decision in this run, from 1.
        unix_seconds: Time of the decision.
        step: The last step before it.
        symptom: The symptom that the proposal was for.
        changes: The proposed changes.
        numerics: The strictest numerics that allow it.
        predicted_gain: Predicted gain of throughput, 0.5 for half as much again; None if unknown.
        gain: Measured gain of throughput, in the same unit; None if nothing was measured.
        lower: Lower bound of the gain.
        upper: Upper bound of the gain.
        pairs: Compared pairs of blocks of steps.
        steps: Steps of the trial.
        exploration_seconds: Training time that the trial and its switches cost.
        verdict: The verdict.
        reason: Why, as half a sentence.
        context: Context in which the verdict holds: link, sample length, ranks.
        in_use: Configuration that training continues with, by knob.
        world_size: Ranks of the job.
        mode: Whether the tuner may act.
    """

    number: int
    unix_seconds: float
    step: int
    symptom: Symptom
    changes: Sequence[Change]
    numerics: Numerics
    predicted_gain: float | None
    gain: float | None = None
    lower: float | None = None
    upper: float | None = None
    pairs: int = 0
    steps: int = 0
    exploration_seconds: float = 0.0
    verdict: Verdict
    reason: str
    context: str
    in_use: Configuration
    world_size: int
    mode: Mode

    @property
    def knob(self) -> str:
        """Name of the changed knob, or "several"."""
        return self.changes[0].knob if len(self.changes) == 1 else SEVERAL


def changes_of(configuration: Configuration, changes: Configuration) -> tuple[Change, ...]:
    """Return the values that differ from the configuration in use, by knob."""
    return tuple(
        Change(knob=knob, before=configuration.get(knob), after=value)
        for knob, value in changes.items()
        if knob not in configuration or configuration[knob] != value
    )


def make_record(
    decision: Decision,
    *,
    number: int,
    unix_seconds: float,
    step: int,
    in_use: Configuration,
    world_size: int,
    mode: Mode,
) -> DecisionRecord:
    """Return the record of a decision."""
    proposal, inputs, result = decision.proposal, decision.inputs, decision.result
    return DecisionRecord(
        number=number,
        unix_seconds=unix_seconds,
        step=step,
        symptom=proposal.symptom,
        changes=changes_of(inputs.configuration, proposal.changes),
        numerics=proposal.numerics,
        predicted_gain=proposal.predicted_gain,
        gain=None if result is None else result.gain,
        lower=None if result is None else result.lower,
        upper=None if result is None else result.upper,
        pairs=0 if result is None else result.pairs,
        steps=len(decision.times),
        exploration_seconds=decision.cost_seconds,
        verdict=decision.verdict,
        reason=decision.reason,
        context=inputs.context or context_of(inputs.reading),
        in_use=in_use,
        world_size=world_size,
        mode=mode,
    )


class DecisionLog:
    """Appends decisions to `decisions.jsonl` in the run folder. Disk errors never raise.

    Attributes:
        lost: Decisions that could not be written.
    """

    def __init__(self) -> None:
        self.lost = 0

    def write(self, folder: Path | None, record: DecisionRecord, decision: Decision) -> None:
        """Append a decision as one line.

        Args:
            folder: The run folder. None before the run has a name, or if no run folder is written.
            record: The decision's record.
            decision: The decision, for its inputs and step times.
        """
        if folder is None:
            self.lost += 1
            return
        line = decision_line(record, decision)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _append(folder / DECISIONS_FILE, line)
        except OSError as error:
            if not self.lost:
                logger.warning(
                    "cannot write %s: %s; tuning continues, decisions are in this log only",
                    folder / DECISIONS_FILE,
                    error,
                )
            self.lost += 1


def decision_line(record: DecisionRecord, decision: Decision) -> bytes:
    """Serialize a decision with its inputs as one JSON line, newline included."""
    values: dict[str, object] = {one.name: getattr(record, one.name) for one in fields(record)}
    values["numerics"] = record.numerics.setting
    line = {
        "schema": SCHEMA_VERSION,
        "knob": record.knob,
        **values,
        "inputs": decision.inputs,
        "design": decision.design,
        "times": decision.times,
    }
    return orjson.dumps(line, default=_plain) + b"\n"


def _plain(value: object) -> list[object] | float:
    """Serialize sets and thresholds, which orjson does not support. Sets are sorted by repr."""
    if isinstance(value, frozenset | set):
        return sorted(value, key=repr)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{value!r} cannot be written")


def _append(path: Path, line: bytes) -> None:
    """Append a line by one write call, also after a line that a killed process has cut."""
    descriptor = open_log(path)
    try:
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, size)
            raise OSError("only a part of the line fitted")
    finally:
        os.close(descriptor)
