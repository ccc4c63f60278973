"""Formats decisions, symptoms and changes: as text for the log, and as a diff of the ds config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from .decision_log import Change, DecisionRecord, changes_of
from .knob_registry import SPECS, KnobSpec
from .policy_types import Configuration, Proposal, Symptom, Value, Verdict

_CAUSES = {
    "comm_bandwidth": "bandwidth",
    "comm_redundancy": "redundant bytes",
    "comm_latency": "latency",
    "comm_imbalance": "waiting for other ranks",
}
_VERDICTS: Mapping[Verdict, str] = {
    "accepted": "accepted",
    "rolled_back": "rolled back",
    "rejected": "rejected",
    "interrupted": "trial ended without a result",
    "not_undone": "could not be undone",
    "advised": "advised, not applied",
}
ACCUMULATION_KEY = "gradient_accumulation_steps"
_DEVICES = {False: "none", True: "cpu"}  # values of the key "device" in offload blocks
_MIN_PREDICTION = 0.01  # predictions cover bytes and calls only; smaller ones are not reported
_NO_GAIN = 0.0005  # smaller gains are reported as none
_FACTOR_FROM = 0.5  # larger gains are reported as a factor

# Only the changed values of a ds config, before and after.
_Tree: TypeAlias = dict[str, "_Tree | tuple[Value, Value]"]


def format_decision(record: DecisionRecord) -> str:
    """Return one line: step, symptom, changes, measured gain, and verdict with its reason."""
    changes = format_changes(record.changes)
    head = f"step {record.step}: {format_symptom(record.symptom)}: {changes}"
    verdict = _VERDICTS[record.verdict]
    if record.gain is not None:
        reason = f", {record.reason}" if record.verdict != "accepted" and record.reason else ""
        return f"{head} made training {_measured(record)}: {verdict}{reason}"
    if record.verdict == "advised":
        reason = f" ({record.reason})" if record.reason else ""
        return f"{head}{reason} {_prediction(record)}; {verdict}"
    return f"{head}: {verdict}, {record.reason}" if record.reason else f"{head}: {verdict}"


def format_symptom(symptom: Symptom) -> str:
    """Return a symptom with its figures."""
    formatter = _FORMATTERS.get(symptom.name)
    if formatter is None:
        return f"{symptom.name} at {_percent(symptom.ratio)}"
    return formatter(symptom)


def format_discarded(num: int, duration: str) -> str:
    """Return why observations ended without a diagnosis.

    Args:
        num: Observations.
        duration: Their training time, as text.
    """
    times = f"{num} time{'s' * (num != 1)}"
    return f"step times changed {times} in {duration}; each change restarts the observation"


def format_trial(proposal: Proposal, configuration: Configuration) -> str:
    """Return the log line of a trial that starts: its changes, and why they are tried."""
    return (
        f"trying {format_changes(changes_of(configuration, proposal.changes))} ({proposal.reason})"
    )


def format_changes(changes: Iterable[Change]) -> str:
    """Return each knob with its value before and after."""
    return ", ".join(
        f"{each.knob} {format_value(each.before)} -> {format_value(each.after)}" for each in changes
    )


def format_value(value: Value) -> str:
    """Return a knob's value as in a ds config, text without quotes."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def format_gain(gain: float, digits: int = 1) -> str:
    """Return a gain of throughput as text, such as "3.1 % faster".

    Args:
        gain: 0.5 for half as much again.
        digits: Decimals of the percentage.
    """
    if abs(gain) < _NO_GAIN:
        return "as fast as before"
    if gain >= _FACTOR_FROM:
        return f"{1 + gain:.{digits + 1}f} times as fast"
    return f"{100 * abs(gain):.{digits}f} % {'faster' if gain > 0 else 'slower'}"


def _measured(record: DecisionRecord) -> str:
    """Return the measured gain with its bounds, pairs of blocks, and steps."""
    gain, lower, upper = record.gain or 0.0, record.lower, record.upper
    figures = [f"{record.pairs} pairs" if record.pairs != 1 else "1 pair"]
    figures += [f"{record.steps} steps"]
    if lower is not None and upper is not None:
        figures.insert(0, _interval(gain, lower, upper))
    return f"{format_gain(gain)} ({', '.join(figures)})"


def _interval(gain: float, lower: float, upper: float) -> str:
    if gain >= _FACTOR_FROM:
        return f"{1 + lower:.2f} to {1 + upper:.2f}"
    return f"{100 * lower:+.1f} to {100 * upper:+.1f} %"


def _prediction(record: DecisionRecord) -> str:
    """Return the predicted gain as text; "may help" where the gain is unknown or small."""
    if record.predicted_gain is None or abs(record.predicted_gain) < _MIN_PREDICTION:
        return "may help"
    return f"would make training about {format_gain(record.predicted_gain, digits=0)}"


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


def _percent_of_time(subject: str) -> Callable[[Symptom], str]:
    return lambda symptom: f"{subject} {_percent(symptom.ratio)} of training time"


_FORMATTERS: Mapping[str, Callable[[Symptom], str]] = {
    **dict.fromkeys(_CAUSES, _communication),
    "device_idle": lambda symptom: f"the device is idle {_percent(symptom.ratio)} of the time",
    "host_bound": _percent_of_time("the device waits for Python"),
    "data_bound": _percent_of_time("loading data takes"),
    "memory_pressure": _memory_pressure,
    "memory_idle": lambda symptom: f"{_percent(symptom.ratio)} of memory is never used",
    "straggler": _straggler,
}


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def format_ds_config_diff(
    changes: Sequence[Change], accumulation: tuple[int, int] | None = None
) -> str:
    """Return changes as lines to apply by hand to the ds config and to the script.

    Args:
        changes: Changed values by knob.
        accumulation: Micro-batches per step, before and after.

    Returns:
        Lines in the format of `diff -u`, without a trailing newline.
    """
    tree: _Tree = {}
    calls = []
    for change in changes:
        spec = SPECS[change.knob]
        key = spec.ds_key
        if key is not None:
            _insert(tree, key, (_ds_value(key, change.before), _ds_value(key, change.after)))
        if key is None or spec.advice is not None:
            calls.append(_call(spec, change))
    if accumulation is not None and accumulation[0] != accumulation[1]:
        tree[ACCUMULATION_KEY] = accumulation
    return "\n".join([*_lines(tree, depth=1), *calls])


def _insert(tree: _Tree, key: tuple[str, ...], values: tuple[Value, Value]) -> None:
    for name in key[:-1]:
        inner = tree.setdefault(name, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[key[-1]] = values


def _lines(tree: _Tree, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield f" {indent}{json.dumps(name)}: {{"
            yield from _lines(inner, depth + 1)
            yield f" {indent}}},"
            continue
        before, after = inner
        if before is not None:
            yield f"-{indent}{json.dumps(name)}: {json.dumps(before)},"
        yield f"+{indent}{json.dumps(name)}: {json.dumps(after)},"


def _ds_value(key: tuple[str, ...], value: Value) -> Value:
    if key[-1] == "device" and isinstance(value, bool):
        return _DEVICES[value]
    return value


def _call(spec: KnobSpec, change: Change) -> str:
    if spec.advice is None:
        return f'+ TrainingRun(..., tuner="auto")  # {spec.description}'
    return f"+ {spec.advice.format(value=_python_literal(change.after))}"


def _python_literal(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
