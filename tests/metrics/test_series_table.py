"""The numbers of series: names, labels and values as on /metrics, numbered as they appear."""

from __future__ import annotations

from itertools import pairwise

from zerowatch.metrics.catalog.communication import COLLECTIVE_DURATION
from zerowatch.metrics.catalog.training import LOSS, PHASE_SECONDS, STEPS
from zerowatch.metrics.exporters.series_table import Family, Series, SeriesTable
from zerowatch.metrics.recorder import Recorder


def test_series_are_numbered_in_the_order_in_which_they_appear_and_keep_their_numbers():
    recorder, table = Recorder(), SeriesTable(with_process=False)
    recorder.add(PHASE_SECONDS, 2, "data")
    recorder.add(PHASE_SECONDS, 3, "forward")
    first = table.values(recorder.snapshot())
    recorder.set(LOSS, 7)
    recorder.add(PHASE_SECONDS, 5, "data")

    second = table.values(recorder.snapshot())

    started = first[2]
    assert (first, second) == ({0: 2, 1: 3, 2: started}, {0: 7, 1: 3, 2: started, 3: 7})
    assert table.families == [
        Family(name=PHASE_SECONDS.name, kind="counter", help=PHASE_SECONDS.help),
        Family(
            name="process_start_time_seconds",
            kind="gauge",
            help="Start time of the process since unix epoch in seconds.",
        ),
        Family(name=LOSS.name, kind="gauge", help=LOSS.help),
    ]
    assert table.series == [
        Series(family=0, name=PHASE_SECONDS.name, labels={"phase": "data"}),
        Series(family=0, name=PHASE_SECONDS.name, labels={"phase": "forward"}),
        Series(family=1, name="process_start_time_seconds", labels={}),
        Series(family=2, name=LOSS.name, labels={}),
    ]


def test_a_series_that_ended_has_no_value_and_gets_its_number_again():
    recorder, table = Recorder(), SeriesTable(with_process=False)
    recorder.set(LOSS, 7)
    recorder.add(STEPS, 3)
    started = table.values(recorder.snapshot())[2]
    recorder.remove(LOSS)

    without = table.values(recorder.snapshot())
    recorder.set(LOSS, 9)

    assert without == {1: 3, 2: started}
    assert table.values(recorder.snapshot()) == {0: 9, 1: 3, 2: started}
    assert len(table.series) == 3


def test_a_histogram_has_its_buckets_added_up_then_its_count_and_sum():
    recorder, table = Recorder(), SeriesTable(with_process=False)
    recorder.add(STEPS, 3)
    recorder.observe(COLLECTIVE_DURATION, 0.00002, "all_reduce")
    recorder.observe(COLLECTIVE_DURATION, 0.5, "all_reduce")
    recorder.observe(COLLECTIVE_DURATION, 7.0, "all_reduce")

    values = table.values(recorder.snapshot())

    assert table.families[1] == Family(
        name=COLLECTIVE_DURATION.name, kind="histogram", help=COLLECTIVE_DURATION.help
    )
    *buckets, count, total = table.series[1:16]
    assert [each.labels for each in buckets] == [
        {"op": "all_reduce", "le": bound}
        for bound in [*map(str, COLLECTIVE_DURATION.buckets), "+Inf"]
    ]
    assert {each.name for each in buckets} == {f"{COLLECTIVE_DURATION.name}_bucket"}
    assert [(each.name, each.labels) for each in (count, total)] == [
        (f"{COLLECTIVE_DURATION.name}_count", {"op": "all_reduce"}),
        (f"{COLLECTIVE_DURATION.name}_sum", {"op": "all_reduce"}),
    ]
    assert list(values) == list(range(17))
    assert table.series[16].name == "process_start_time_seconds"
    counts = [values[index] for index in range(1, 14)]
    assert counts == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3]
    assert all(lower <= upper for lower, upper in pairwise(counts))
    assert (values[14], values[15]) == (3, 7.50002)


def test_metrics_of_the_process_are_added_on_demand_and_keep_their_numbers():
    recorder, table = Recorder(), SeriesTable(with_process=True)

    first = table.values(recorder.snapshot())
    recorder.add(STEPS, 3)
    second = table.values(recorder.snapshot())

    names = {each.name for each in table.series}
    assert {"process_open_fds", "process_cpu_seconds_total", STEPS.name} <= names
    families = {table.families[each.family].name for each in table.series}
    assert {"process_open_fds", "process_cpu_seconds_total"} <= families
    assert second.keys() - first.keys() == {len(first)}
    assert table.series[len(first)].name == STEPS.name


def test_the_work_can_be_divided_before_each_metric():
    recorder, table, pauses = Recorder(), SeriesTable(with_process=False), list[None]()
    recorder.add(PHASE_SECONDS, 2, "data")
    recorder.add(PHASE_SECONDS, 3, "forward")
    recorder.set(LOSS, 7)
    recorder.observe(COLLECTIVE_DURATION, 0.5, "all_reduce")

    table.values(recorder.snapshot(), lambda: pauses.append(None))

    assert len(pauses) == 3
