"""Replays recorded decisions of the tuner: the same inputs, decided again by today's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import orjson

from zerowatch.runtime.tuner.policy.ab_comparison import AbComparison, TrialDesign, TrialResult
from zerowatch.runtime.tuner.policy.decision_log import (
    SCHEMA_VERSION,
    Change,
    DecisionRecord,
    changes_of,
)
from zerowatch.runtime.tuner.policy.decision_messages import format_changes, format_gain
from zerowatch.runtime.tuner.policy.diagnose import Thresholds, diagnose
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import JobFacts, ModelTraits, Numerics, Symptom
from zerowatch.runtime.tuner.policy.proposals import TunerInput, propose

# What a damaged line, or one of another version, raises as it is parsed.
PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDecision:
    """A line of `decisions.jsonl`.

    Attributes:
        decision: The decision.
        inputs: What the change was proposed from.
        design: The trial's design; None where there was no trial.
        times: Seconds per sample of each step of the trial in order; None for unusable ones.
    """

    decision: DecisionRecord
    inputs: TunerInput
    design: TrialDesign | None
    times: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """Differences of today's decisions; a field is None where there is none.

    Attributes:
        diagnosis: The symptoms found.
        proposal: The change proposed first.
        verdict: The verdict on the recorded step times.
    """

    diagnosis: str | None = None
    proposal: str | None = None
    verdict: str | None = None


def parse_line(line: bytes) -> RecordedDecision:
    """Parse a line; raises one of `PARSE_ERRORS` where it is damaged or of another version."""
    data = orjson.loads(line)
    if data["schema"] != SCHEMA_VERSION:
        raise ValueError(f"schema {data['schema']} is not {SCHEMA_VERSION}")
    design = data["design"]
    return RecordedDecision(
        decision=_parse_decision(data),
        inputs=_parse_inputs(data["inputs"]),
        design=None if design is None else _parse_design(design),
        times=data["times"],
    )


def replay(record: RecordedDecision) -> ReplayDifference:
    """Diagnose, propose and judge again."""
    return ReplayDifference(
        diagnosis=_diagnosis(record), proposal=_proposal(record), verdict=_verdict(record)
    )


def judge_again(design: TrialDesign, times: Sequence[float | None]) -> TrialResult | None:
    """Run a trial on recorded step times; None where they are too few for a verdict."""
    trial = AbComparison(design)
    for time in times:
        trial.add(time)
    return trial.result


def _parse_decision(data: Mapping[str, Any]) -> DecisionRecord:
    values = {one.name: data[one.name] for one in fields(DecisionRecord)}
    values["symptom"] = Symptom(**data["symptom"])
    values["changes"] = tuple(Change(**change) for change in data["changes"])
    values["numerics"] = Numerics[data["numerics"].upper()]
    return DecisionRecord(**values)


def _parse_design(data: Mapping[str, Any]) -> TrialDesign:
    return TrialDesign(**{**data, "initial_a_block": tuple(data["initial_a_block"])})


def _parse_inputs(data: Mapping[str, Any]) -> TunerInput:
    facts = {**data["facts"], "traits": ModelTraits(**data["facts"]["traits"])}
    values = {
        **data,
        "facts": JobFacts(**facts),
        "numerics": Numerics(data["numerics"]),
        "symptoms": tuple(Symptom(**symptom) for symptom in data["symptoms"]),
        "reading": MetricsDelta(**data["reading"]),
        "excluded": frozenset((knob, value) for knob, value in data["excluded"]),
        "thresholds": Thresholds(**data["thresholds"]),
    }
    return TunerInput(**values)


def _diagnosis(record: RecordedDecision) -> str | None:
    then = [symptom.name for symptom in record.inputs.symptoms]
    now = [symptom.name for symptom in _symptoms(record)]
    if then == now:
        return None
    return f"found {', '.join(now) or 'nothing'} instead of {', '.join(then) or 'nothing'}"


def _proposal(record: RecordedDecision) -> str | None:
    """Return today's first proposal; None where the recorded one is among today's proposals."""
    inputs = replace(record.inputs, symptoms=_symptoms(record))
    proposed = [changes_of(inputs.configuration, one.changes) for one in propose(inputs)]
    if tuple(record.decision.changes) in proposed:
        return None
    return format_changes(proposed[0]) if proposed else "nothing"


def _verdict(record: RecordedDecision) -> str | None:
    decision = record.decision
    if record.design is None or decision.gain is None:
        return None
    found = judge_again(record.design, record.times)
    if found is None:
        return "undecided"
    if found.verdict == decision.verdict:
        return None
    return f"{found.verdict}: {found.reason} ({format_gain(found.gain)})"


def _symptoms(record: RecordedDecision) -> Sequence[Symptom]:
    return diagnose(record.inputs.reading, record.inputs.thresholds)
