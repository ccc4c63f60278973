"""Defines a line of the metrics log: all metrics of one rank at one moment.

This file defines the schema of `runs/<run_id>/metrics-<r>.jsonl`. If an older reader would
misunderstand a change, increase SCHEMA_VERSION.

The first line of a file has a head, lists all series, and has all their values. Each later line has
the series that are new, and the values that have changed. A line with a head may also be in the
middle of a file: after a restart, and every FULL_LINE_EVERY lines, so that a damaged line does not
make all later lines useless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from .exporters.series_table import Family, Series

SCHEMA_VERSION = 1
# A time beyond this, in the year 5138, is damage.
MAX_UNIX_SECONDS = 1e11
# The types of the fields of `MetricsHead`, `Family` and `Series`.
_FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("run_id", "host", "node", "detail", "name", "kind", "help"), str),
    **dict.fromkeys(("rank", "local_rank", "world_size", "attempt", "family"), int),
    "interval_seconds": (int, float),
    "instance": (str, type(None)),
    "labels": dict,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsHead:
    """The rank whose metrics follow.

    Attributes:
        run_id: The run.
        rank: The global rank, which is a label of all series.
        local_rank: The rank on its node.
        world_size: Number of ranks.
        host: Host name of the rank.
        node: Value of the label `node` that Prometheus adds.
        instance: Address at which the rank serves metrics: the label `instance`; None if it serves
            none.
        attempt: Restarts of this node's processes before this process.
        interval_seconds: Time between two lines.
        detail: "full", whatever `serve.detail` is; logs of older versions may have "lean".
    """

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    host: str
    node: str
    instance: str | None
    attempt: int
    interval_seconds: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """One line of the log.

    Attributes:
        session: When the log of this process began, in Unix seconds. Identifies the lines that
            belong together.
        number: Number of the line in its session, from 0. A missing number is a lost line.
        unix_seconds: The time of the values.
        head: The rank, if the lists of families and series start again with this line; else None.
        families: The families that are new.
        series: The series that are new.
        values: The values that have changed, by index of the series. A series without a value has
            ended.
        cost_seconds: CPU time that the line before this one took to read, encode and write; None
            for the first line.
    """

    session: float
    number: int
    unix_seconds: float
    head: MetricsHead | None
    families: Sequence[Family]
    series: Sequence[Series]
    values: Mapping[int, float | None]
    cost_seconds: float | None


def encode(line: MetricsLine) -> bytes:
    """Return the line as JSON, including the newline."""
    content: dict[str, object] = {
        "session": line.session,
        "number": line.number,
        "time": line.unix_seconds,
    }
    if line.cost_seconds is not None:
        content["cost_seconds"] = round(line.cost_seconds, 6)
    if line.head is not None:
        content["schema"] = SCHEMA_VERSION
        content["head"] = line.head
    if line.families:
        content["families"] = line.families
    if line.series:
        content["series"] = line.series
    content["indices"] = list(line.values)
    content["values"] = [_as_json(value) for value in line.values.values()]
    return orjson.dumps(content) + b"\n"


def decode(text: bytes) -> MetricsLine:
    """Return the line that `encode` has encoded.

    Raises:
        ValueError: The text is not a whole line, or is of a later schema. The message is the
            reason.
    """
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("not a whole line of JSON") from None
    try:
        schema = content.get("schema", SCHEMA_VERSION)
        if schema > SCHEMA_VERSION:
            raise ValueError(f"schema {schema} is of a later version of zerowatch")
        head = content.get("head")
        values = map(_as_float, content["values"])
        session, unix_seconds = float(content["session"]), float(content["time"])
        if not all(abs(each) < MAX_UNIX_SECONDS for each in (session, unix_seconds)):  # nor NaN
            raise TypeError("no time")
        return MetricsLine(
            session=session,
            number=int(content["number"]),
            unix_seconds=unix_seconds,
            head=None if head is None else _checked(MetricsHead, head),
            families=[_checked(Family, family) for family in content.get("families", ())],
            series=[_checked(Series, series) for series in content.get("series", ())],
            values=dict(zip(map(int, content["indices"]), values, strict=True)),
            cost_seconds=_as_float(content.get("cost_seconds")),
        )
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"not a line of the metrics log ({error!r})") from None


def _checked(kind: Callable[..., T], fields: Mapping[str, Any]) -> T:
    """Return a part of a line.

    Raises:
        TypeError: A field is missing, or has another type.
    """
    for name, value in fields.items():
        if not isinstance(value, _FIELD_TYPES.get(name, object)):
            raise TypeError(f"{name} is {value!r:.40}")
    texts = (*fields.get("labels", {}).items(),)
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise TypeError(f"labels are {texts!r:.40}")
    return kind(**fields)


def _as_json(value: float | None) -> float | str | None:
    """Return the value, or its name if JSON has no such number."""
    return value if value is None or math.isfinite(value) else str(float(value))


def _as_float(value: float | str | None) -> float | None:
    return None if value is None else float(value)
