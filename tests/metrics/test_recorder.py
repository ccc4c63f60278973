"""Tests of the recorder and its snapshots: values, labels, histograms and commits."""

from __future__ import annotations

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zerowatch.metrics.catalog.communication import (
    COLLECTIVE_CALLS,
    COLLECTIVE_DURATION,
    EXCHANGE_FAILURES,
)
from zerowatch.metrics.catalog.memory import OOMS
from zerowatch.metrics.catalog.overhead import DEAD_THREADS
from zerowatch.metrics.catalog.training import LOSS, PHASE_SECONDS, RUN_INFO, SAMPLES, STEPS
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder

FACTS = ("run-1", "0.1.0", "2.13.0", "0.19.8", "gloo", "cpu", "2", "2")


def test_add_increases_a_counter():
    recorder = Recorder()

    recorder.add(STEPS, 2)
    recorder.add(STEPS, 3)

    assert recorder.snapshot().value(STEPS) == 5


def test_a_gauge_holds_the_last_value_set():
    recorder = Recorder()

    recorder.set(LOSS, 5.5)
    recorder.set(LOSS, 2.5)

    assert recorder.snapshot().value(LOSS) == 2.5


def test_series_of_one_metric_differ_by_their_labels():
    recorder = Recorder()

    recorder.add(COLLECTIVE_CALLS, 1, "all_reduce", "dp", "backward")
    recorder.add(COLLECTIVE_CALLS, 4, "all_gather", "dp", "optimizer")

    snapshot = recorder.snapshot()
    assert snapshot.value(COLLECTIVE_CALLS, "all_gather", "dp", "optimizer") == 4
    assert snapshot.total(COLLECTIVE_CALLS) == 5


def test_set_info_replaces_the_previous_labels():
    recorder = Recorder()

    recorder.set_info(RUN_INFO, *FACTS)
    recorder.set_info(RUN_INFO, "run-2", *FACTS[1:])

    assert dict(recorder.snapshot().values[RUN_INFO]) == {("run-2", *FACTS[1:]): 1.0}


def test_counters_that_begin_with_a_feature_start_at_zero_in_all_their_series():
    recorder = Recorder()
    recorder.add(EXCHANGE_FAILURES, 2, "peer")

    recorder.start_counters((EXCHANGE_FAILURES, COLLECTIVE_CALLS, LOSS))
    recorder.start_counters((OOMS,), device=("cpu",))

    assert recorder.snapshot().values == {
        EXCHANGE_FAILURES: {("store",): 0, ("peer",): 2, ("unmatched",): 0},
        OOMS: {("cpu", outcome): 0 for outcome in ("replayed", "fatal", "killed", "raised")},
    }


def test_an_observation_counts_in_the_first_bucket_whose_bound_is_not_lower():
    recorder = Recorder()
    bounds = COLLECTIVE_DURATION.buckets
    below, on, above_all = bounds[0] / 2, bounds[5], 60.0

    for seconds in (below, on, above_all):
        recorder.observe(COLLECTIVE_DURATION, seconds, "all_reduce")

    distribution = recorder.snapshot().distribution(COLLECTIVE_DURATION, "all_reduce")
    assert distribution is not None
    assert distribution.counts == (1, 0, 0, 0, 0, 1, *[0] * (len(bounds) - 6), 1)
    assert distribution.sum == pytest.approx(below + on + above_all)


def test_a_bucket_keeps_its_last_exemplar():
    recorder = Recorder()

    recorder.observe(COLLECTIVE_DURATION, 0.05, "all_reduce", exemplar={"trace_id": "aa"})
    recorder.observe(COLLECTIVE_DURATION, 0.04, "all_reduce", exemplar={"trace_id": "bb"})
    recorder.observe(COLLECTIVE_DURATION, 0.04, "all_reduce")

    distribution = recorder.snapshot().distribution(COLLECTIVE_DURATION, "all_reduce")
    assert distribution is not None
    seen = [exemplar for exemplar in distribution.exemplars if exemplar]
    assert [(exemplar.labels, exemplar.value) for exemplar in seen] == [({"trace_id": "bb"}, 0.04)]


def test_an_unknown_label_value_is_rejected_and_creates_no_series():
    recorder = Recorder()

    with pytest.raises(ValueError, match=r"collective_calls_total: op='all_reduces' is none of"):
        recorder.add(COLLECTIVE_CALLS, 1, "all_reduces", "dp", "backward")
    with pytest.raises(
        ValueError, match=r"collective_duration_seconds: op='all_reduces' is none of"
    ):
        recorder.observe(COLLECTIVE_DURATION, 1.0, "all_reduces")

    snapshot = recorder.snapshot()
    assert COLLECTIVE_CALLS not in snapshot.values
    assert COLLECTIVE_DURATION not in snapshot.distributions


def test_a_missing_label_is_rejected():
    recorder = Recorder()

    with pytest.raises(ValueError, match=r"takes labels \('op', 'group', 'phase'\), got"):
        recorder.add(COLLECTIVE_CALLS, 1, "all_reduce", "dp")


def test_a_snapshot_does_not_change_afterwards():
    recorder = Recorder()
    recorder.add(STEPS, 1)
    recorder.observe(COLLECTIVE_DURATION, 0.03, "all_reduce")

    snapshot = recorder.snapshot()
    recorder.add(STEPS, 1)
    recorder.observe(COLLECTIVE_DURATION, 0.03, "all_reduce")

    distribution = snapshot.distribution(COLLECTIVE_DURATION, "all_reduce")
    assert snapshot.value(STEPS) == 1
    assert distribution is not None
    assert distribution.count == 1


def test_a_concurrent_snapshot_contains_a_commit_completely():
    recorder = Recorder()
    halfway, read_begun, read_done = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def write() -> None:
        with recorder.commit():
            recorder.add(STEPS, 1)
            halfway.set()
            read_begun.wait(120)
            # Time enough to read half a commit; a reader that waits its turn takes longer.
            read_done.wait(0.1)
            recorder.add(SAMPLES, 8)

    def read() -> None:
        read_begun.set()
        snapshot = recorder.snapshot()
        seen.append((snapshot.value(STEPS), snapshot.value(SAMPLES)))
        read_done.set()

    writer, reader = threading.Thread(target=write), threading.Thread(target=read)
    writer.start()
    halfway.wait(120)
    reader.start()
    writer.join(120)
    reader.join(120)

    assert seen == [(1, 8)]


def test_a_gauge_with_a_function_has_its_value_of_the_moment_of_the_snapshot():
    recorder, dead = Recorder(), []
    recorder.set_function(DEAD_THREADS, lambda: len(dead))

    first = recorder.snapshot()
    dead.append("watch")

    assert first.value(DEAD_THREADS) == 0
    assert recorder.snapshot().value(DEAD_THREADS) == 1


def test_the_series_of_a_snapshot_have_the_names_and_values_of_the_exposition():
    recorder = Recorder()
    recorder.add(STEPS, 3)
    recorder.set(LOSS, 0.25)
    recorder.add(COLLECTIVE_CALLS, 2, "all_reduce", "dp", "backward")
    recorder.observe(COLLECTIVE_DURATION, 0.5, "all_reduce")
    recorder.set_info(RUN_INFO, 'a "quoted" \\ name', *FACTS[1:])
    snapshot = recorder.snapshot()

    _, text = exposition(snapshot, 0, "")
    shown = {
        (sample.name, *sorted(sample.labels.items() - {("rank", "0")})): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "process_start_time_seconds"))
    }
    ours = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for line, value in snapshot.series().items()
        for family in text_string_to_metric_families(f"{line} {value}\n")
        for sample in family.samples
    }

    assert ours == shown
    assert f"{len(ours)} series" in repr(snapshot)


def test_values_added_together_give_the_same_sums_as_one_by_one():
    amounts = [0.1, 0.7, 1e-9, 3.3, 0.1]
    single, together = Recorder(), Recorder()

    for recorder in (single, together):
        recorder.add(PHASE_SECONDS, 0.3, "forward")
        recorder.observe(COLLECTIVE_DURATION, 0.2, "all_reduce")
    for amount in amounts:
        single.add(PHASE_SECONDS, amount, "forward")
        single.observe(COLLECTIVE_DURATION, amount, "all_reduce")
    together.add_all(PHASE_SECONDS, amounts, "forward")
    together.observe_all(COLLECTIVE_DURATION, amounts, "all_reduce")

    assert together.snapshot() == single.snapshot()


def test_values_added_together_are_counted_in_exponential_buckets_too():
    single, together = Recorder(), Recorder()
    single.counts_exponentially = together.counts_exponentially = True

    for amount in (0.1, 0.7):
        single.observe(COLLECTIVE_DURATION, amount, "all_reduce")
    together.observe_all(COLLECTIVE_DURATION, (0.1, 0.7), "all_reduce")

    assert together.snapshot() == single.snapshot()
