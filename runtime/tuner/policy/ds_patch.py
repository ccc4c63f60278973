"""A change as what to write by hand: a difference of the ds config, or a call of TrainingRun."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from .decision import Change
from .registry import SPECS
from .types import Value

ACCUMULATION_KEY = "gradient_accumulation_steps"
# What stands in the configuration where it is no yes or no.
_DEVICES = {False: "none", True: "cpu"}
_CALLS: Mapping[str, str] = {
    "micro_batch_samples": "DataLoader(..., batch_size={value}), or what else cuts batches",
    "gradient_compression": "run.compress({value})",
    "asynchronous_reduction": "run.compress(..., asynchronous={value})",
    "activation_checkpointing": "run.checkpoint_activations({value}), or the model's own switch",
    "balance": "TrainingRun(..., balance={value})",
    "python_gc": "gc.disable(), and gc.collect(1) after each step",
}

_Tree: TypeAlias = dict[str, "_Tree | tuple[Value, Value]"]


def ds_patch(changes: Sequence[Change], accumulation: tuple[int, int] | None = None) -> str:
    """Write changes as lines to put into the ds config by hand, or into the script.

    Args:
        changes: What is to differ.
        accumulation: Micro-batches of a step, before and after, where micro-batches change.

    Returns:
        Lines as `diff -u` writes them, without a newline at the end.
    """
    tree: _Tree = {}
    calls = []
    for change in changes:
        key = SPECS[change.knob].ds_key
        if key is not None:
            _put(tree, key, (_written(key, change.before), _written(key, change.after)))
        if key is None or change.knob in _CALLS:
            calls.append(_call(change))
    if accumulation is not None and accumulation[0] != accumulation[1]:
        tree[ACCUMULATION_KEY] = accumulation
    return "\n".join([*_lines(tree, depth=1), *calls])


def _put(tree: _Tree, key: tuple[str, ...], values: tuple[Value, Value]) -> None:
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


def _written(key: tuple[str, ...], value: Value) -> Value:
    if key[-1] == "device" and isinstance(value, bool):
        return _DEVICES[value]
    return value


def _call(change: Change) -> str:
    call = _CALLS.get(change.knob)
    if call is None:
        return f'+ TrainingRun(..., tuner="auto")  # {SPECS[change.knob].what}'
    return f"+ {call.format(value=_in_python(change.after))}"


def _in_python(value: Value) -> str:
    """Write a value as Python does, with the quotes of this house."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
