"""A decision as one plain sentence, for the log and for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from .decision import Change, Decision, changes_of
from .types import Configuration, Proposal, Symptom, Value, Verdict

_CAUSES = {
    "comm_bandwidth": "bandwidth",
    "comm_redundancy": "bytes that need not be sent",
    "comm_latency": "the price of each call",
    "comm_imbalance": "waiting for other ranks",
}
_ENDS: Mapping[Verdict, str] = {
    "accepted": "kept",
    "rolled_back": "taken back",
    "rejected": "not tried",
    "advised": "left to you",
}
_FORETOLD = 0.01  # predictions know of bytes and calls alone; below that they say nothing
_ALIKE, _IN_TIMES = 0.0005, 0.5  # gains below the one are none, from the other on so many times


def sentence_of(decision: Decision) -> str:
    """Say what was seen, what was changed, what that gained and what became of it."""
    changes = changes_words(decision.changes)
    head = f"step {decision.step}: {symptom_words(decision.symptom)}: {changes}"
    end = _ENDS[decision.verdict]
    if decision.gain is not None:
        end = "not kept" if decision.verdict == "rejected" else end
        why = f", {decision.reason}" if decision.verdict != "accepted" and decision.reason else ""
        return f"{head} made training {_measured(decision)}: {end}{why}"
    if decision.verdict == "advised":
        why = f" ({decision.reason})" if decision.reason else ""
        return f"{head}{why} {_prospect(decision)}; {end}"
    return f"{head}: {end}, {decision.reason}" if decision.reason else f"{head}: {end}"


def symptom_words(symptom: Symptom) -> str:
    """Say what holds a job back, with its figures."""
    words = _WORDS.get(symptom.name)
    return f"{symptom.name} at {_percent(symptom.ratio)}" if words is None else words(symptom)


def trial_words(proposal: Proposal, configuration: Configuration) -> str:
    """Say what goes on trial, instead of the configuration in use."""
    return f"trying {changes_words(changes_of(configuration, proposal.changes))} ({proposal.why})"


def changes_words(changes: Iterable[Change]) -> str:
    """Say what changes, from what to what."""
    return ", ".join(
        f"{each.knob} {value_words(each.before)} -> {value_words(each.after)}" for each in changes
    )


def value_words(value: Value) -> str:
    """Write a knob's value as in a ds config, but for words without quotes."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def speed_words(gain: float, digits: int = 1) -> str:
    """Write a gain of throughput as how fast training became, with so many digits of a percent."""
    if abs(gain) < _ALIKE:
        return "as fast as before"
    if gain >= _IN_TIMES:
        return f"{1 + gain:.{digits + 1}f} times as fast"
    return f"{100 * abs(gain):.{digits}f} % {'faster' if gain > 0 else 'slower'}"


def _measured(decision: Decision) -> str:
    gain, lower, upper = decision.gain or 0.0, decision.lower, decision.upper
    told = [f"{decision.pairs} pairs" if decision.pairs != 1 else "1 pair"]
    told += [f"{decision.steps} steps"]
    if lower is not None and upper is not None:
        told.insert(0, _between(gain, lower, upper))
    return f"{speed_words(gain)} ({', '.join(told)})"


def _between(gain: float, lower: float, upper: float) -> str:
    if gain >= _IN_TIMES:
        return f"{1 + lower:.2f} to {1 + upper:.2f}"
    return f"{100 * lower:+.1f} to {100 * upper:+.1f} %"


def _prospect(decision: Decision) -> str:
    if decision.predicted_gain is None or abs(decision.predicted_gain) < _FORETOLD:
        return "may help"
    return f"would make training about {speed_words(decision.predicted_gain, digits=0)}"


def _communication(symptom: Symptom) -> str:
    total = symptom.evidence.get("comm_exposed_ratio", symptom.ratio)
    cause = f"{_CAUSES[symptom.name]} alone {_percent(symptom.ratio)}"
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
    free = "" if headroom is None else f", {_percent(headroom)} of its limit is free"
    return f"memory runs out within 50 steps with probability {symptom.ratio:.2f}{free}"


def _share_of_time(what: str) -> Callable[[Symptom], str]:
    return lambda symptom: f"{what} {_percent(symptom.ratio)} of training time"


_WORDS: Mapping[str, Callable[[Symptom], str]] = {
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
