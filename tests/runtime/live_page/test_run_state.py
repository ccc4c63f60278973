"""Tests of the state that the page shows: its values are those of the metrics."""

from __future__ import annotations

import pytest
from recorded_runs import STARTED, step_record

from zerowatch.metrics.catalog import communication, devices, memory, training, tuner
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.live_page.run_state import MAX_RANKS, Ranks, run_state
from zerowatch.runtime.live_page.step_history import CAUSES, StepHistory

NOW = STARTED + 60
NO_RANKS = Ranks(figures={}, slow={}, addresses={}, nodes={})


@pytest.fixture
def recorder():
    recorder = Recorder()
    recorder.set(training.RUN_ACTIVE, 1)
    return recorder


def state_of(recorder, *, ranks=NO_RANKS, recent=None, now=NOW):
    return run_state(
        recorder.snapshot(), recent=recent, ranks=ranks, thresholds={}, run_id="night-7", now=now
    )


def last_minute(steps=100):
    history = StepHistory(lambda: [0.1] * len(CAUSES))
    for step in range(1, steps + 1):
        history.add(step_record(step, comm_exposed_seconds=0.1))
    return history.last_seconds(60.0, min_steps=1)


def test_a_run_without_steps_has_no_figures(recorder):
    state = state_of(recorder)

    assert state["status"] == "starting"
    assert state["run"]["run_id"] == "night-7"
    assert state["training"]["loss"] is None
    assert state["communication"]["exposed_ratio"] is None
    assert state["memory"] == []
    assert state["tuner"]["state"] is None


def test_figures_of_the_last_minute_are_those_of_its_steps(recorder):
    state = state_of(recorder, recent=last_minute())

    assert state["training"]["steps_per_second"] == pytest.approx(2.0)
    assert state["training"]["tokens_per_second"] == pytest.approx(2048.0)
    assert state["communication"]["exposed_ratio"] == pytest.approx(0.2)
    assert state["training"]["step"] == 100


def test_exposed_time_of_the_run_is_the_sum_over_groups_over_training_time(recorder):
    recorder.add(communication.COMM_EXPOSED_SECONDS, 2, "dp")
    recorder.add(communication.COMM_EXPOSED_SECONDS, 1, "tp")
    recorder.add(communication.COMM_CAUSE_SECONDS, 3, "imbalance")
    recorder.add(training.PHASE_SECONDS, 10, "forward")
    recorder.add(training.PHASE_SECONDS, 90, "checkpoint")

    state = state_of(recorder)

    assert state["communication"]["exposed_seconds"] == 3
    assert state["communication"]["run_exposed_ratio"] == pytest.approx(0.3)
    assert state["communication"]["causes"]["imbalance"] == 3
    assert state["phases"]["seconds"] == {"forward": 10, "checkpoint": 90}


def test_memory_has_the_limit_the_risk_and_the_categories_of_each_device(recorder):
    recorder.set(memory.MEMORY_BYTES, 7e9, "cuda:0", "allocated")
    recorder.set(memory.MEMORY_BYTES, 1e9, "cpu", "allocated")
    recorder.set(memory.MEMORY_LIMIT, 8e9, "cuda:0")
    recorder.set(memory.OOM_RISK, 0.7, "cuda:0")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 5e9, "cuda:0", "parameters")
    recorder.set(devices.DEVICE_UTILIZATION, 0.9, "cuda:0")

    gpu, host = state_of(recorder)["memory"]

    assert (gpu["device"], gpu["allocated"], gpu["limit"], gpu["risk"]) == ("cuda:0", 7e9, 8e9, 0.7)
    assert gpu["categories"] == {"parameters": 5e9}
    assert (host["device"], host["limit"]) == ("cpu", None)
    assert state_of(recorder)["devices"] == [
        {"device": "cuda:0", "utilization": 0.9, "power": None, "temperature": None}
    ]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({training.STEPS: 3, training.LAST_ACTIVITY_TIMESTAMP: NOW - 5}, "training"),
        ({training.STEPS: 3, training.LAST_ACTIVITY_TIMESTAMP: NOW - 500}, "stalled"),
        ({communication.HANG_ACTIVE: 1}, "hanging"),
        ({training.RUN_ACTIVE: 0}, "ended"),
    ],
)
def test_the_status_is_that_of_the_dashboards(recorder, changes, status):
    for spec, value in changes.items():
        recorder.set(spec, value)

    assert state_of(recorder)["status"] == status


def test_an_ended_run_has_the_reason_as_status(recorder):
    recorder.set(training.RUN_ACTIVE, 0)
    recorder.set_info(training.RUN_END_INFO, "interrupted")

    assert state_of(recorder)["status"] == "interrupted"


def test_the_table_of_ranks_has_figures_addresses_and_slow_phases(recorder):
    ranks = Ranks(
        figures={0: {"comm_wait": 0.1}, 1: {"comm_wait": 0.0}},
        slow={1: {"backward": 0.3}},
        addresses={0: "a:1", 1: "a:2", 2: "b:1"},
        nodes={0: "a", 1: "a", 2: "b"},
    )
    recorder.set(training.WORLD_SIZE, 4)

    table = state_of(recorder, ranks=ranks)["ranks"]

    assert (table["world_size"], table["known"], table["figures"]) == (4, 3, ["comm_wait"])
    assert [row["rank"] for row in table["rows"]] == [0, 1, 2]
    assert table["rows"][1] == {
        "rank": 1,
        "node": "a",
        "address": "a:2",
        "slow": {"backward": 0.3},
        "comm_wait": 0.0,
    }


def test_of_many_ranks_the_slow_ones_and_those_waited_for_are_shown(recorder):
    figures = {rank: {"comm_wait": rank / 1000} for rank in range(1000)}
    ranks = Ranks(figures=figures, slow={999: {"forward": 0.2}}, addresses={}, nodes={})

    table = state_of(recorder, ranks=ranks)["ranks"]

    assert table["known"] == 1000
    assert [row["rank"] for row in table["rows"]] == [*range(MAX_RANKS - 1), 999]


def test_the_tuner_has_its_state_knobs_and_decisions(recorder):
    recorder.set(tuner.TUNER_STATE, 0, "warmup")
    recorder.set(tuner.TUNER_STATE, 1, "observe")
    recorder.set(tuner.TUNER_KNOB_VALUE, 5e8, "reduce_bucket_size")
    recorder.add(tuner.TUNER_DECISIONS, 2, "accepted")
    recorder.add(tuner.TUNER_DECISIONS, 0, "rejected")

    shown = state_of(recorder)["tuner"]

    assert shown["state"] == "observe"
    assert shown["knobs"] == {"reduce_bucket_size": 5e8}
    assert shown["decisions"] == {"accepted": 2}
