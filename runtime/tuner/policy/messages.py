"""Formats decisions, symptoms and changes as text for the log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from .decision import Change, Decision, changes_of
from .types import Configuration, Proposal, Symptom, Value, Verdict

_CAUSES = {
    "comm_bandwidth": "bandwidth",
    "comm_redundancy": "redundant bytes",
    "comm_latency": "latency",
    "comm_imbalance": "waiting for other ranks",
}
_ENDS: Mapping[Verdict, str] = {
    "accepted": "kept",
    "rolled_back": "rolled back",
    "rejected": "not tried",
    "advised": "not applied",
}
_MIN_PREDICTION = 0.01  # predictions cover bytes and calls only; smaller ones are not reported
_NO_GAIN = 0.0005  # smaller gains are reported as none
_FACTOR_FROM = 0.5  # larger gains are reported as a factor


def format_decision(decision: Decision) -> str:
    """Return one line: step, symptom, changes, measured gain, and verdict with its reason."""
    changes = format_changes(decision.changes)
    head = f"step {decision.step}: {format_symptom(decision.symptom)}: {changes}"
    end = _ENDS[decision.verdict]
    if decision.gain is not None:
        end = "not kept" if decision.verdict == "rejected" else end
        why = f", {decision.reason}" if decision.verdict != "accepted" and decision.reason else ""
        return f"{head} made training {_measured(decision)}: {end}{why}"
    if decision.verdict == "advised":
        why = f" ({decision.reason})" if decision.reason else ""
        return f"{head}{why} {_prediction(decision)}; {end}"
    return f"{head}: {end}, {decision.reason}" if decision.reason else f"{head}: {end}"


def format_symptom(symptom: Symptom) -> str:
    """Return a symptom with its figures."""
    formatter = _FORMATTERS.get(symptom.name)
    if formatter is None:
        return f"{symptom.name} at {_percent(symptom.ratio)}"
    return formatter(symptom)


def format_trial(proposal: Proposal, configuration: Configuration) -> str:
    """Return which changes of the configuration in use go on trial, and why."""
    return f"trying {format_changes(changes_of(configuration, proposal.changes))} ({proposal.why})"


def format_changes(changes: Iterable[Change]) -> str:
    """Return knobs with their values before and after."""
    return ", ".join(
        f"{each.knob} {format_value(each.before)} -> {format_value(each.after)}" for each in changes
    )


def format_value(value: Value) -> str:
    """Return a knob's value as in a ds config, text without quotes."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def format_gain(gain: float, digits: int = 1) -> str:
    """Return a gain of throughput as relative speed, with so many digits of a percent."""
    if abs(gain) < _NO_GAIN:
        return "as fast as before"
    if gain >= _FACTOR_FROM:
        return f"{1 + gain:.{digits + 1}f} times as fast"
    return f"{100 * abs(gain):.{digits}f} % {'faster' if gain > 0 else 'slower'}"


def _measured(decision: Decision) -> str:
    gain, lower, upper = decision.gain or 0.0, decision.lower, decision.upper
    figures = [f"{decision.pairs} pairs" if decision.pairs != 1 else "1 pair"]
    figures += [f"{decision.steps} steps"]
    if lower is not None and upper is not None:
        figures.insert(0, _interval(gain, lower, upper))
    return f"{format_gain(gain)} ({', '.join(figures)})"


def _interval(gain: float, lower: float, upper: float) -> str:
    if gain >= _FACTOR_FROM:
        return f"{1 + lower:.2f} to {1 + upper:.2f}"
    return f"{100 * lower:+.1f} to {100 * upper:+.1f} %"


def _prediction(decision: Decision) -> str:
    if decision.predicted_gain is None or abs(decision.predicted_gain) < _MIN_PREDICTION:
        return "may help"
    return f"would make training about {format_gain(decision.predicted_gain, digits=0)}"


def _communication(symptom: Symptom) -> str:
    total = symptom.evidence.get("comm_exposed_ratio", symptom.ratio)
    cause = f"{_CAUSES[symptom.name]} {_percent(symptom.ratio)}"
    if symptom.ratio > total / 2:
        cause = f"most of it {_CAUSES[symptom.name]}"
    return f"communication takes {_percent(total)} of training time, {cause}"


def _straggler(symptom: Symptom) -> str:
    score = symptom.evidence.get("straggler_score_ratio", 0.0)
    if score > symptom.evidence.get("imbalance_ratio", 0.0):
        return f"rank 0 is slower than the others by {_percent(score)} of a step"
    return f"waiting for slower ranks takes {_percent(symptom.ratio)} of training time"


def _memory_pressure(symptom: Symptom) -> str:
    evidence = symptom.evidence
    headroom = evidence.get("headroom_ratio")
    free = "" if headroom is None else f", {_percent(headroom)} of the limit is free"
    return f"out-of-memory within 50 steps has probability {symptom.ratio:.2f}{free}"


def _share_of_time(subject: str) -> Callable[[Symptom], str]:
    return lambda symptom: f"{subject} {_percent(symptom.ratio)} of training time"


_FORMATTERS: Mapping[str, Callable[[Symptom], str]] = {
    **dict.fromkeys(_CAUSES, _communication),
    "device_idle": lambda symptom: f"the device is idle {_percent(symptom.ratio)} of the time",
    "host_bound": _share_of_time("the device waits for Python"),
    "data_bound": _share_of_time("loading data takes"),
    "memory_pressure": _memory_pressure,
    "memory_idle": lambda symptom: f"{_percent(symptom.ratio)} of memory is never used",
    "straggler": _straggler,
}


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
