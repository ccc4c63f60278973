"""Tests of `serve.detail`: which series are left out, which are added up, and how many remain."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from fakes.scraper import get

from zerowatch.metrics.catalog import (
    CATALOG,
    across_ranks,
    communication,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.labels import OWN_GROUP
from zerowatch.metrics.catalog.spec import Label, MetricSpec
from zerowatch.metrics.exporters.detail import lean_spec, served
from zerowatch.metrics.exporters.otlp_families import families
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder

MAX_SERIES, MAX_SERIES_OF_RANK_ZERO = 100, 250
# About the whole run, so only rank 0 has them.
ON_RANK_ZERO = {
    *tuner.METRICS,
    *window.ON_RANK_ZERO,
    *across_ranks.METRICS,
    training.ALERT_THRESHOLD,
    training.LAST_CHECKPOINT_BYTES,
}
GPU, HOST = "cuda:0", "cpu"
# Values that only a run knows. More XID errors than this would be news of their own.
OPEN_SETS = {"device": (GPU, HOST), "knob": tuple("abcdefghijkl"), "xid": ("79",)}


def possible_series(spec: MetricSpec) -> Iterable[tuple[str, ...]]:
    """Return the label values of all series that one rank with a GPU can have."""
    return product(*(_values(spec, label) for label in spec.labels))


def _values(spec: MetricSpec, label: Label) -> tuple[str, ...]:
    if spec in (communication.COMM_LINK_BANDWIDTH, communication.COMM_LINK_BEST_BANDWIDTH):
        return tuple(group for group in label.values if group != OWN_GROUP)  # never estimated
    if spec.name.startswith("zerowatch_device_") and "utilization" not in spec.name:
        return (label.values or (GPU,)) if label.name == "device" else label.values or ("79",)
    if label.name == "category":  # a device leaks in one category at a time
        return label.values[:1]
    return label.values or OPEN_SETS.get(label.name, ("some",))


def recorder_of(specs: Iterable[MetricSpec]) -> Recorder:
    recorder = Recorder()
    for spec in specs:
        for labels in possible_series(spec):
            if spec.kind == "histogram":
                recorder.observe(spec, 1.0, *labels)
            elif spec.kind == "info":
                recorder.set_info(spec, *labels)
            else:
                recorder.set(spec, 1.0, *labels)
    return recorder


def lines_of(recorder: Recorder, detail: str) -> list[str]:
    text = exposition(served(recorder.snapshot(), detail), 5, "")[1].decode()
    series = [line for line in text.splitlines() if not line.startswith("#")]
    assert series.pop().startswith('process_start_time_seconds{rank="5"}')
    return series


def test_a_rank_serves_at_most_a_hundred_series_in_any_job():
    lines = lines_of(recorder_of(spec for spec in CATALOG if spec not in ON_RANK_ZERO), "lean")

    assert 1 + len(lines) <= MAX_SERIES, sorted(lines)  # and the start time of the process


def test_rank_zero_adds_the_metrics_of_the_whole_run():
    lines = lines_of(recorder_of(CATALOG), "lean")

    assert 1 + len(lines) <= MAX_SERIES_OF_RANK_ZERO, sorted(lines)


def test_full_detail_serves_everything():
    recorder = recorder_of(CATALOG)

    snapshot = recorder.snapshot()

    assert served(snapshot, "full") is snapshot


def test_a_label_that_is_left_out_is_added_up():
    recorder = Recorder()
    recorder.add(communication.COMM_EXPOSED_SECONDS, 2.5, "dp")
    recorder.add(communication.COMM_EXPOSED_SECONDS, 0.5, "tp")
    recorder.add(overhead.WATCH_SECONDS, 1, "hooks")

    assert lines_of(recorder, "lean") == [
        'zerowatch_comm_exposed_seconds_total{rank="5"} 3.0',
        'zerowatch_watch_seconds_total{rank="5"} 1.0',
    ]


def test_only_the_chosen_values_of_a_label_are_served():
    recorder = Recorder()
    for state in ("allocated", "reserved", "inactive_split"):
        recorder.set(memory.MEMORY_BYTES, 7.0, GPU, state)

    assert lines_of(recorder, "lean") == [
        'zerowatch_memory_bytes{device="cuda:0",rank="5",state="allocated"} 7.0'
    ]


def test_a_histogram_keeps_its_count_and_sum():
    recorder = Recorder()
    for seconds in (0.2, 0.4, 500.0):
        recorder.observe(training.STEP_DURATION, seconds, exemplar={"trace_id": "1"})

    assert [line for line in lines_of(recorder, "lean") if "created" not in line] == [
        'zerowatch_step_duration_seconds_bucket{le="+Inf",rank="5"} 3.0',
        'zerowatch_step_duration_seconds_count{rank="5"} 3.0',
        'zerowatch_step_duration_seconds_sum{rank="5"} 500.6',
    ]


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_only_counters_are_added_up_and_only_by_labels_that_they_have(spec):
    if spec.lean is None:
        return
    names = set(spec.label_names)
    assert not spec.lean.without or spec.kind == "counter"
    assert names >= {*spec.lean.without, *spec.lean.only}
    for label in spec.labels:
        assert set(spec.lean.only.get(label.name, ())) <= set(label.values)


def test_the_server_leaves_series_out(make_server, recorder):
    recorder.add(communication.COLLECTIVE_CALLS, 1, "barrier", "world", "other")
    recorder.add(communication.COMM_SECONDS, 2, "world")

    lean, full = (get(make_server(detail=detail).start())[2] for detail in ("lean", "full"))

    assert 'zerowatch_comm_seconds_total{rank="0"} 2.0' in lean
    assert "zerowatch_collective_calls_total" not in lean
    assert 'process_start_time_seconds{rank="0"}' in lean
    assert "process_open_fds" not in lean
    assert 'zerowatch_comm_seconds_total{group="world",rank="0"} 2.0' in full
    assert "zerowatch_collective_calls_total" in full


def test_otlp_sends_what_the_server_serves():
    snapshot = served(recorder_of(CATALOG).snapshot(), "lean")

    names = {family.name for family in families(snapshot, {"rank": "0"})}

    assert names == {spec.name for spec in CATALOG if spec.lean is not None}


def test_a_metric_that_keeps_its_labels_keeps_its_spec():
    assert lean_spec(training.LOSS) is training.LOSS
    assert lean_spec(communication.COMM_SECONDS).labels == ()
