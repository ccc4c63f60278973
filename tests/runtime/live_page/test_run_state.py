"""Tests of the state that the page shows: its values are those of the metrics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from recorded_runs import STARTED, step_record

from zerowatch.metrics.catalog import communication, devices, memory, overhead, training, tuner
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.live_page.run_state import MAX_RANKS, Ranks, run_state
from zerowatch.runtime.live_page.step_history import CAUSES, Point, StepHistory

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


@pytest.mark.parametrize(
    ("untimed_calls", "coverage", "expected"), [(0, 1.0, 0.0), (2, 1.0, None), (0, 0.0, None)]
)
def test_exposed_time_of_the_run_is_unknown_if_no_call_has_a_duration(
    recorder, untimed_calls, coverage, expected
):
    recorder.set(communication.COMM_COVERAGE_RATIO, coverage)
    recorder.add(training.PHASE_SECONDS, 10, "forward")
    recorder.set(overhead.DROPPED_RECORDS, untimed_calls, "timing")  # as calls of DDP

    state = state_of(recorder)

    assert state["communication"]["exposed_seconds"] == expected
    assert state["communication"]["run_exposed_ratio"] == expected


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


def test_each_value_of_the_state_is_that_of_its_metric(recorder: Recorder) -> None:
    info = ("night-7", "0.1.0", "2.9.0", "0.19.3", "nccl", "cuda", "3", "2")
    recorder.set_info(training.RUN_INFO, *info)
    recorder.set(training.RUN_ATTEMPT, 2)
    recorder.set(training.RUN_START_TIMESTAMP, NOW - 600)
    recorder.set(training.LAST_STEP_TIMESTAMP, NOW - 3)
    recorder.set(training.LAST_ACTIVITY_TIMESTAMP, NOW - 2)
    recorder.set(training.WORLD_SIZE, 2)
    recorder.add(training.STEPS, 120)
    recorder.set(training.STEP_DURATION_QUANTILE, 0.4, "0.5")
    recorder.set(training.STEP_DURATION_QUANTILE, 0.9, "0.99")
    for spec, value in (
        (training.LOSS, 2.5),
        (training.GRADIENT_NORM, 1.25),
        (training.LEARNING_RATE, 1e-4),
        (training.LOSS_SCALE, 1024.0),
        (training.MFU, 0.31),
        (training.NONFINITE_LOSSES, 4.0),
        (training.SKIPPED_STEPS, 5.0),
        (training.LAST_CHECKPOINT_TIMESTAMP, NOW - 100),
        (communication.COMM_VOLUME_RATIO, 1.5),
        (communication.COMM_COVERAGE_RATIO, 0.995),
        (overhead.WATCH_LAST_UPDATE_TIMESTAMP, NOW - 1),
    ):
        recorder.set(spec, value)
    recorder.add(training.CHECKPOINTS, 3, "saved")
    for phase, seconds in (("forward", 10.0), ("backward", 25.0), ("eval", 5.0), ("data", 0.0)):
        recorder.add(training.PHASE_SECONDS, seconds, phase)
    recorder.add(communication.COMM_SECONDS, 9.0, "dp")
    recorder.add(communication.COMM_SECONDS, 4.0, "tp")
    recorder.add(communication.COMM_UNION_SECONDS, 11.0)
    recorder.add(communication.COMM_EXPOSED_SECONDS, 7.0, "dp")
    recorder.add(communication.COMM_CAUSE_SECONDS, 6.0, "bandwidth")
    recorder.add(communication.COLLECTIVE_WIRE_BYTES, 1000, "all_reduce", "dp")
    recorder.add(communication.COLLECTIVE_WIRE_BYTES, 500, "all_gather", "dp")
    recorder.set(communication.COMM_LINK_BANDWIDTH, 3e9, "dp")
    recorder.set(communication.STRAGGLER_SCORE, 0.02, "data")
    recorder.set(memory.MEMORY_BYTES, 1e9, "cpu", "allocated")
    recorder.set(memory.MEMORY_LIMIT, 8e9, "cuda:0")
    recorder.set(memory.MEMORY_BYTES, 5e9, "cuda:0", "allocated")
    recorder.set(memory.MEMORY_PEAK, 6e9, "cuda:0", "allocated")
    recorder.set(memory.MEMORY_PREDICTED_PEAK, 6.5e9, "cuda:0")
    recorder.set(memory.MEMORY_BASELINE, 2e9, "cuda:0")
    recorder.set(memory.OOM_RISK, 0.25, "cuda:0")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 4e9, "cuda:0", "parameters")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 0.0, "cuda:0", "other")
    for device, busy in (("cpu", 0.2), ("cuda:0", 0.9)):
        recorder.set(devices.DEVICE_UTILIZATION, busy, device)
    recorder.set(devices.DEVICE_POWER, 300.0, "cuda:0")
    recorder.set(devices.DEVICE_TEMPERATURE, 65.0, "cuda:0")
    recorder.set(tuner.TUNER_STATE, 1, "trial")
    recorder.set(tuner.TUNER_KNOB_VALUE, 5e8, "reduce_bucket_size")
    recorder.set(tuner.TUNER_GAIN, 0.07, "reduce_bucket_size")
    recorder.set(tuner.TUNER_GAIN_LOWER_BOUND, 0.05, "reduce_bucket_size")
    recorder.set(tuner.TUNER_SYMPTOM, 0.3, "comm_bandwidth")
    recorder.set(tuner.TUNER_SYMPTOM, 0.0, "data_bound")
    recorder.add(overhead.WATCH_SECONDS, 0.25, "hooks")
    recorder.add(overhead.WATCH_SECONDS, 0.5, "watch_thread")
    recorder.add(overhead.DROPPED_RECORDS, 3, "steps")
    recorder.add(overhead.HOOK_FAILURES, 6, "forward")
    ranks = Ranks(
        figures={0: {"comm_wait": 0.1, "step_duration": 0.4}, 1: {"comm_wait": 0.05}},
        slow={1: {"backward": 0.3}},
        addresses={0: "a:1", 1: "b:1"},
        nodes={0: "a", 1: "b"},
    )
    recent = Point(
        step=120,
        ended_at=NOW - 3,
        seconds=50.0,
        steps=100,
        phase_seconds=[2.0, 8.0, 20.0, 5.0, 3.0, 1.0, 4.0, 7.0],
        timed_seconds=40.0,
        exposed_seconds=6.0,
        loss_sum=0.0,
        loss_steps=0,
        nonfinite_losses=0,
        samples=800,
        tokens=102_400,
        peak_bytes={},
        cause_seconds=[0.5, 1.5, 2.5, 0.25],
    )

    state = state_of(recorder, ranks=ranks, recent=recent)

    assert state == {
        "now": NOW,
        "run": {
            "run_id": "night-7",
            "version": "0.1.0",
            "torch": "2.9.0",
            "deepspeed": "0.19.3",
            "backend": "nccl",
            "accelerator": "cuda",
            "zero_stage": "3",
            "world_size": "2",
            "attempt": 2,
            "started_at": NOW - 600,
            "last_step_at": NOW - 3,
            "last_activity_at": NOW - 2,
        },
        "status": "training",
        "problems": [
            {
                "alert": "ZerowatchStragglerRank",
                "severity": "warning",
                "text": "rank 1 is slow in backward: 30% of a step",
            }
        ],
        "training": {
            "step": 120,
            "steps": 120,
            "step_seconds": {"0.5": 0.4, "0.99": 0.9},
            "steps_per_second": 2,
            "samples_per_second": 16,
            "tokens_per_second": 2048,
            "loss": 2.5,
            "gradient_norm": 1.25,
            "learning_rate": 1e-4,
            "loss_scale": 1024,
            "mfu": 0.31,
            "nonfinite_losses": 4,
            "skipped": 5,
            "checkpoints": 3,
            "last_checkpoint_at": NOW - 100,
        },
        "phases": {
            "seconds": {"forward": 10, "backward": 25, "eval": 5},
            "recent_seconds": {"forward": 8, "backward": 20, "eval": 3},
        },
        "communication": {
            "exposed_ratio": 0.15,
            "run_exposed_ratio": 0.2,
            "exposed_seconds": 7,
            "seconds": 11,
            "causes": {"latency": 0, "bandwidth": 6, "imbalance": 0, "redundancy": 0},
            "recent_causes": {
                "latency": 0.5,
                "bandwidth": 1.5,
                "imbalance": 2.5,
                "redundancy": 0.25,
            },
            "wire_bytes": 1500,
            "volume_ratio": 1.5,
            "coverage": 0.995,
            "link_bandwidth": {"dp": 3e9},
        },
        "memory": [
            {
                "device": "cuda:0",
                "allocated": 5e9,
                "peak": 6e9,
                "limit": 8e9,
                "predicted_peak": 6.5e9,
                "risk": 0.25,
                "baseline": 2e9,
                "categories": {"parameters": 4e9},
            },
            {
                "device": "cpu",
                "allocated": 1e9,
                "peak": None,
                "limit": None,
                "predicted_peak": None,
                "risk": None,
                "baseline": None,
                "categories": {},
            },
        ],
        "devices": [
            {"device": "cuda:0", "utilization": 0.9, "power": 300, "temperature": 65},
            {"device": "cpu", "utilization": 0.2, "power": None, "temperature": None},
        ],
        "ranks": {
            "world_size": 2,
            "known": 2,
            "figures": ["step_duration", "comm_wait"],
            "rows": [
                {
                    "rank": 0,
                    "node": "a",
                    "address": "a:1",
                    "slow": {},
                    "comm_wait": 0.1,
                    "step_duration": 0.4,
                },
                {
                    "rank": 1,
                    "node": "b",
                    "address": "b:1",
                    "slow": {"backward": 0.3},
                    "comm_wait": 0.05,
                },
            ],
            "own_scores": {"data": 0.02},
        },
        "tuner": {
            "state": "trial",
            "knobs": {"reduce_bucket_size": 5e8},
            "gains": {"reduce_bucket_size": 0.07},
            "gain_lower_bounds": {"reduce_bucket_size": 0.05},
            "symptoms": {"comm_bandwidth": 0.3},
            "decisions": {},
        },
        "monitoring": {"seconds": 0.75, "updated_at": NOW - 1, "dropped": 3, "failures": 6},
    }


@pytest.mark.parametrize(("age", "status"), [(300.0, "training"), (301.0, "stalled")])
def test_training_is_stalled_after_five_minutes_without_progress(
    recorder: Recorder, age: float, status: str
) -> None:
    recorder.set(training.LAST_ACTIVITY_TIMESTAMP, NOW - age)
    recorder.add(training.STEPS, 1)

    assert state_of(recorder)["status"] == status


@pytest.mark.parametrize(("known", "shown"), [(64, range(64)), (65, [*range(63), 64])])
def test_of_more_than_64_ranks_those_without_a_wait_are_shown_last(
    recorder: Recorder, known: int, shown: Sequence[int]
) -> None:
    figures = {rank: {"comm_wait": 0.1 if rank != 63 else 0.2} for rank in range(known)}
    ranks = Ranks(figures=figures, slow={}, addresses={}, nodes={})

    table = state_of(recorder, ranks=ranks)["ranks"]

    assert [row["rank"] for row in table["rows"]] == list(shown)
