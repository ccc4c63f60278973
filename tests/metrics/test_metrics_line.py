"""A line of the metrics log: what is written, what is read back, and what is called damage."""

from __future__ import annotations

import json
import math

import pytest

from zerowatch.metrics.exporters.series_table import Family, Series
from zerowatch.metrics.metrics_line import MetricsHead, MetricsLine, decode, encode

HEAD = MetricsHead(
    run_id="night-7",
    rank=3,
    local_rank=1,
    world_size=8,
    host="host",
    node="node",
    instance="10.0.0.3:9464",
    attempt=2,
    interval_seconds=15.0,
    detail="full",
)
FIRST = MetricsLine(
    session=100.5,
    number=0,
    unix_seconds=107.25,
    head=HEAD,
    families=[Family(name="f", kind="gauge", help="Help.")],
    series=[Series(family=0, name="s", labels={"phase": "data"})],
    values={0: 1.5, 4: None, 7: math.inf},
    cost_seconds=None,
)
LATER = MetricsLine(
    session=100.5,
    number=6,
    unix_seconds=122.25,
    head=None,
    families=[],
    series=[],
    values={7: -math.inf},
    cost_seconds=0.0012344,
)


def test_the_first_line_has_the_schema_the_rank_and_all_series():
    line = encode(FIRST)

    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "session": 100.5,
        "number": 0,
        "time": 107.25,
        "schema": 1,
        "head": {
            "run_id": "night-7",
            "rank": 3,
            "local_rank": 1,
            "world_size": 8,
            "host": "host",
            "node": "node",
            "instance": "10.0.0.3:9464",
            "attempt": 2,
            "interval_seconds": 15.0,
            "detail": "full",
        },
        "families": [{"name": "f", "kind": "gauge", "help": "Help."}],
        "series": [{"family": 0, "name": "s", "labels": {"phase": "data"}}],
        "indices": [0, 4, 7],
        "values": [1.5, None, "inf"],
    }


def test_a_later_line_has_only_what_changed_and_its_cost_in_microseconds():
    assert json.loads(encode(LATER)) == {
        "session": 100.5,
        "number": 6,
        "time": 122.25,
        "cost_seconds": 0.001234,
        "indices": [7],
        "values": ["-inf"],
    }


@pytest.mark.parametrize("line", [FIRST, LATER], ids=["first", "later"])
def test_a_line_is_read_as_it_was_written(line):
    read = decode(encode(line))

    assert (read.head, read.values, read.number) == (line.head, line.values, line.number)
    assert (read.session, read.unix_seconds) == (line.session, line.unix_seconds)
    assert (read.families, read.series) == (line.families, line.series)
    assert read.cost_seconds == pytest.approx(line.cost_seconds, abs=1e-6)


def test_not_a_number_is_read_back():
    fields = json.loads(encode(LATER)) | {"values": ["nan"]}

    assert math.isnan(decode(json.dumps(fields).encode()).values[7])


def changed(**fields):
    return json.dumps(json.loads(encode(FIRST)) | fields).encode()


@pytest.mark.parametrize("seconds", [99_999_999_999.0, -99_999_999_999.0])
def test_times_until_the_year_5138_are_read(seconds):
    assert decode(changed(time=seconds)).unix_seconds == seconds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (encode(FIRST)[:-5], "not a whole line of JSON"),
        (changed(schema=2), "schema 2 is of a later version of zerowatch"),
        (b"[1]", "not a line of the metrics log"),
        (b"{}", "KeyError"),
        (changed(time=1e11), "no time"),
        (changed(session=1e11), "no time"),
        (changed(time="nan"), "no time"),
        (changed(head={"rank": 3}), "TypeError"),
        (changed(head={**json.loads(encode(FIRST))["head"], "rank": "3"}), "rank is '3'"),
        (changed(series=[{"family": 0, "name": "s", "labels": {"a": 1}}]), "labels are"),
        (changed(families=[{"name": "f", "kind": 1, "help": ""}]), "kind is 1"),
    ],
)
def test_damage_is_reported_with_its_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        decode(text)
