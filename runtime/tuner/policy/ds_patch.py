"""Formats a change as a diff of the ds config, or as a call in the script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .decision import Change
from .registry import SPECS, KnobSpec
from .types import Value

ACCUMULATION_KEY = "gradient_accumulation_steps"
_DEVICES = {False: "none", True: "cpu"}  # of offload blocks

_Tree: TypeAlias = dict[str, "_Tree | tuple[Value, Value]"]


def ds_patch(changes: Sequence[Change], accumulation: tuple[int, int] | None = None) -> str:
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
