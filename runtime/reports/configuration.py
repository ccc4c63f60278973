"""Compares what two runs are: settings, ds config, software, hardware, batches, tuner changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from ...metrics.catalog import devices
from ..common.hidden_secrets import without_secret_parts, without_secrets
from ..common.plain_text import printable
from .metrics_reader import RecordedMetrics
from .run_reader import RankSteps, RecordedRun
from .run_summary import RunSummary, num_ranks_at, shared_work

Source = Literal["hardware", "batch", "software", "ds config", "settings", "tuner"]
NOT_SET = "not set"
# Settings that differ between any two runs.
_IDENTITY = frozenset({"run_id"})
_SOFTWARE = ("version", "torch", "deepspeed", "backend")
# Sequence lengths vary from batch to batch; a smaller difference of tokens is no other batch.
TOKENS_TOLERANCE = 0.05


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


def differences(a: RunSource, b: RunSource) -> tuple[Difference, ...]:
    """Return what differs between two runs, as far as it is recorded in both."""
    found: list[Difference] = []
    for source, first, second in (
        ("hardware", _hardware(a), _hardware(b)),
        ("batch", _batch(a), _batch(b)),
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
    if name.startswith("tokens per step") and isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOKENS_TOLERANCE * max(a, b)
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
        "hosts": len({steps.host for steps in run.ranks.values()}),
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


def _batch(source: RunSource) -> dict[str, object]:
    """Return the batch of a step of all ranks, as the step logs have it."""
    run, shared = source.run, shared_work(source.run, source.metrics)
    facts: dict[str, object] = {}
    for name in ("samples", "tokens", "micro_batches"):
        known = [x for s in run.ranks.values() if (x := s.totals[name].mean) is not None]
        if known:
            mean = sum(known) / len(known)
            each_rank = name == "micro_batches"
            title = "micro-batches per step" if each_rank else f"{name} per step"
            if name in shared:  # a sum over ranks would count some of it several times
                each_rank, title = True, f"{name} per step of a rank"
            facts[title] = round(mean if each_rank else mean * _usual_num_ranks(run, name), 3)
    return facts


def _usual_num_ranks(run: RecordedRun, name: str) -> float:
    """Return how many ranks have a value in most steps."""

    def places(steps: RankSteps) -> NDArray[np.int64]:
        known: NDArray[np.int64] = steps.column("step")[~np.isnan(steps.column(name))]
        return known

    numbers = np.unique(np.concatenate([places(steps) for steps in run.ranks.values()]))
    return float(np.median(num_ranks_at(run, places, numbers)))


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
