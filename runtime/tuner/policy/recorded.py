"""A decision as a line of JSON, with all that it was made from, and back again.

The schema of `runs/<run_id>/decisions.jsonl` is this file. A change that an older reader would
misread raises SCHEMA_VERSION.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from .decision import Change, Decision
from .diagnose import Thresholds
from .experiment import Conclusion
from .metrics_delta import MetricsDelta
from .numerics import JobFacts, ModelTraits
from .proposals import TunerInput
from .trial_plan import TrialPlan
from .types import Numerics, Symptom

SCHEMA_VERSION = 1
# What a line that is none may raise as it is taken apart.
DAMAGES = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A decision as it was made, and what from.

    Attributes:
        decision: What was decided.
        situation: What the change was proposed from.
        plan: How it was measured; None where it was not.
        times: Seconds per sample of each window of the trial in order, None where it said nothing.
    """

    decision: Decision
    situation: TunerInput
    plan: TrialPlan | None
    times: Sequence[float | None]


def to_json_line(decision: Decision, conclusion: Conclusion) -> bytes:
    """Write a decision and what it was made from as one line, newline included."""
    known: dict[str, object] = {one.name: getattr(decision, one.name) for one in fields(decision)}
    known["contract"] = decision.contract.name.lower()
    line = {
        "schema": SCHEMA_VERSION,
        "knob": decision.knob,
        **known,
        "situation": conclusion.situation,
        "plan": conclusion.plan,
        "times": conclusion.times,
    }
    return orjson.dumps(line, default=_listed) + b"\n"


def from_json(line: bytes) -> Recorded:
    """Read a line.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It is damaged, or of another version.
    """
    data = orjson.loads(line)
    if data["schema"] != SCHEMA_VERSION:
        raise ValueError(f"it has schema {data['schema']}, not {SCHEMA_VERSION}")
    plan = data["plan"]
    return Recorded(
        decision=_decision(data),
        situation=_situation(data["situation"]),
        plan=None if plan is None else TrialPlan(**{**plan, "lead": tuple(plan["lead"])}),
        times=data["times"],
    )


def _listed(values: object) -> list[object]:
    """Write what orjson does not know: sets, of values that have no order."""
    if isinstance(values, frozenset | set):
        return sorted(values, key=repr)
    raise TypeError(f"{values!r} cannot be written")


def _decision(data: Mapping[str, Any]) -> Decision:
    values = {one.name: data[one.name] for one in fields(Decision)}
    values["symptom"] = Symptom(**data["symptom"])
    values["changes"] = tuple(Change(**change) for change in data["changes"])
    values["contract"] = Numerics[data["contract"].upper()]
    return Decision(**values)


def _situation(data: Mapping[str, Any]) -> TunerInput:
    facts = {
        **data["facts"],
        "exact_knobs": frozenset(data["facts"]["exact_knobs"]),
        "traits": ModelTraits(**data["facts"]["traits"]),
    }
    values = {
        **data,
        "facts": JobFacts(**facts),
        "contract": Numerics(data["contract"]),
        "symptoms": tuple(Symptom(**symptom) for symptom in data["symptoms"]),
        "reading": MetricsDelta(**data["reading"]),
        "denied": frozenset((knob, value) for knob, value in data["denied"]),
        "thresholds": Thresholds(**data["thresholds"]),
    }
    return TunerInput(**values)
