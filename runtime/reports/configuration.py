"""Compares what two runs are: settings, ds config, software, hardware, batches, tuner changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ...metrics.catalog import devices
from ..common.hidden_secrets import without_secret_parts, without_secrets
from ..common.plain_text import printable
from .metrics_reader import RecordedMetrics
from .run_reader import RecordedRun
from .run_summary import RunSummary

Source = Literal["hardware", "batch", "software", "ds config", "settings", "tuner"]
NOT_SET = "not set"
# Settings that differ between any two runs.
_IDENTITY = frozenset({"run_id"})
_SOFTWARE = ("version", "torch", "deepspeed", "backend")
# Smaller differences are no other batch: sequence lengths vary, and the last batch of an epoch is
# short.
TOLERANCES: Mapping[str, float] = {"tokens": 0.05, "samples": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        source: Where it comes from.
        name: Such as "zero_optimization.stage".
        a: The value of the first run, as text.
        b: The value of the second run, as text.
    """

    source: Source
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.name}: {self.a} -> {self.b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """A run with all that was read of it."""

    run: RecordedRun
    metrics: RecordedMetrics
    summary: RunSummary


def differences(
    a: RunSource, b: RunSource, batches: Sequence[Mapping[str, float]]
) -> tuple[Difference, ...]:
    """Return what differs between two runs, as far as it is recorded in both.

    Args:
        a: The first run.
        b: The second run.
        batches: The batch of a compared step of each, by name.
    """
    found: list[Difference] = []
    for source, first, second in (
        ("hardware", _hardware(a), _hardware(b)),
        ("batch", *batches),
        ("software", _software(a), _software(b)),
        ("ds config", _ds_config(a, b), _ds_config(b, a)),
        ("settings", dict(_flat(a.run.settings)), dict(_flat(b.run.settings))),
        ("tuner", _tuner(a), _tuner(b)),
    ):
        found += _differing(source, first, second)  # type: ignore[arg-type]
    return tuple(found)


def not_recorded(a: RunSource, b: RunSource) -> Iterator[str]:
    """Yield which parts of the configuration cannot be compared; one sentence each."""
    for name, of in (("ds config", _has_ds_config), ("settings", lambda x: bool(x.run.settings))):
        missing = [letter for letter, each in (("A", a), ("B", b)) if not of(each)]
        if missing:
            yield f"the {name} of {' and '.join(missing)} is not recorded, so it is not compared"


def _has_ds_config(source: RunSource) -> bool:
    return source.run.ds_config is not None


def _differing(
    source: Source, a: Mapping[str, object], b: Mapping[str, object]
) -> Iterator[Difference]:
    is_config = source in ("ds config", "settings", "tuner")
    if not is_config:  # a fact that one run has not recorded is no difference
        a, b = ({name: x[name] for name in x if name in y} for x, y in ((a, b), (b, a)))
    elif source != "tuner" and not (a and b):
        return
    for name in dict.fromkeys([*a, *b]):
        first, second = a.get(name, NOT_SET), b.get(name, NOT_SET)
        if not _is_same(name, first, second):
            yield Difference(source=source, name=printable(name), a=_value(first), b=_value(second))


def _is_same(name: str, a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        for work, tolerance in TOLERANCES.items():
            if name.startswith(f"{work} per step"):
                return math.isclose(a, b, rel_tol=tolerance)
    # 1e6 and 1000000 are the same number, 1 and true are not the same value.
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _value(value: object) -> str:
    if isinstance(value, str):
        return printable(without_secret_parts(value))
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e15 else str(value)
    return printable(orjson.dumps(without_secrets(value), default=str).decode())


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested mappings with their dotted names."""
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in _IDENTITY:
            yield f"{prefix}{name}", value


def _ds_config(source: RunSource, other: RunSource) -> dict[str, object]:
    if source.run.ds_config is None or other.run.ds_config is None:
        return {}
    return dict(_flat(source.run.ds_config))


def _hardware(source: RunSource) -> dict[str, object]:
    run = source.run
    facts: dict[str, object] = {
        "ranks": run.world_size,
        "hosts": len(source.summary.facts.hosts),
    }
    if accelerator := source.summary.facts.info.get("accelerator"):
        facts["accelerator"] = accelerator
    names = sorted(
        dict(labels).get("name", "")
        for rank in source.metrics.ranks.values()
        for labels in rank.values(devices.DEVICE_INFO.name)
    )
    if names:
        facts["devices"] = ", ".join(
            f"{names.count(name)} x {name}" for name in dict.fromkeys(names)
        )
    return facts


def _software(source: RunSource) -> dict[str, object]:
    info = source.summary.facts.info
    return {
        "zerowatch" if name == "version" else name: info[name] for name in _SOFTWARE if name in info
    }


def _tuner(source: RunSource) -> dict[str, object]:
    """Return the changes that the tuner made during a run, the last one of each knob."""
    return {
        each.change.split(" ", 1)[0]: f"{each.change} at step {each.step}"
        for each in source.summary.tuner.decisions
        if each.verdict == "accepted"
    }
