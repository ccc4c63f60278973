"""Writes runs in which no two figures are equal, for tests of what computes and shows figures."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_metrics import RecordedRank
from recorded_runs import STARTED, step_record, write_run

from zerowatch.metrics.catalog import communication, devices, memory, overhead, training
from zerowatch.metrics.step_record import CollectiveTotals, StepRecord

STEPS = 20


def uneven_record(rank: int, step: int) -> StepRecord:
    """A step of a run in which no two figures are equal; rank 0 takes longer with each step."""
    phases = (
        {"data": 0.1, "forward": 0.4, "backward": 0.8, "optimizer": 0.2, "generate": 0.16},
        {"data": 0.3, "forward": 0.3, "backward": 1.2, "optimizer": 0.1, "generate": 0.2},
    )[rank]
    other = (0.1 * step, 0.3)[rank]
    outside = ({"eval": 0.06, "checkpoint": 0.04}, {"eval": 0.02, "checkpoint": 0.08})[rank]
    exposed = (
        {"backward": 0.4, "eval": 0.03, "checkpoint": 0.07},
        {"backward": 0.2, "eval": 0.1},
    )[rank]
    calls = CollectiveTotals(
        calls=2 + rank,
        payload_bytes=1000 * (1 + rank),
        wire_bytes=1500.0 + 1000 * rank,
        seconds=0.1 + 0.2 * rank,
    )
    untimed = CollectiveTotals(calls=1, payload_bytes=10, wire_bytes=20.0, seconds=None)
    wide = CollectiveTotals(calls=5, payload_bytes=100, wire_bytes=8000.0, seconds=0.4)
    return step_record(
        step,
        seconds=sum(phases.values()) + other + sum(outside.values()),
        phase_seconds={**phases, "other": other, **outside},
        samples=(8, 6)[rank],
        tokens=(1000, 500)[rank],
        loss=(100.0, 50.0)[rank] - step,
        nonfinite_loss=step in ((3,), (3, 4))[rank],
        skipped=rank == 0 and step % 5 == 0,
        gradient_norm=9.0 if rank else 1.5 + 3 * (step == 7),
        collectives={"all_reduce": calls, "broadcast": untimed, "all_gather": wide}
        if rank
        else {"all_reduce": calls},
        comm_seconds=(0.7, 0.8)[rank],
        comm_exposed_seconds=sum(exposed.values()),
        comm_exposed_phase_seconds=exposed,
        memory_bytes={
            "cpu": {"allocated": 600e6, "limit": 2e9},
            "cuda:0": {
                "allocated": 1e9,
                "peak_allocated": (3e9, 2e9)[rank] + 1e6 * step,
                "limit": 4e9,
            },
        },
        oom_risk_ratio={"cuda:0": (0.3, 0.02)[rank] if step == 10 else 0.01 + 0.02 * rank},
        device_readings={
            "cpu": {"utilization_ratio": 0.2, "temperature_celsius": 40.0},
            "cuda:0": {
                "utilization_ratio": (0.5, 0.75)[rank] + 0.1 * (-1) ** step,
                "temperature_celsius": (60.0, 70.0)[rank] + step,
            },
        },
    )


def uneven_run(folder: Path) -> Path:
    """A run of two ranks whose metrics logs have counted fewer steps than the step logs."""
    write_run(folder, steps=STEPS, record=uneven_record)
    (folder / "attempts.jsonl").write_text("")
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            record_uneven_metrics(rank, number)
    return folder


def record_uneven_metrics(rank: RecordedRank, number: int) -> None:
    recorder = rank.recorder
    recorder.add(training.STEPS, (20, 10)[number])
    seconds = ({"forward": 4.0, "generate": 2.0}, {"forward": 6.0, "generate": 2.0})[number]
    for phase, spent in {**seconds, "eval": 1.0, "checkpoint": 0.5}.items():
        recorder.add(training.PHASE_SECONDS, spent, phase)
    causes = (
        {"imbalance": 0.3, "bandwidth": 0.1},
        {"latency": 0.2, "redundancy": 0.05, "bandwidth": 0.15},
    )[number]
    for cause, spent in causes.items():
        recorder.add(communication.COMM_CAUSE_SECONDS, spent, cause)
    recorder.add(communication.COMM_EXPOSED_SECONDS, (0.6, 0.4)[number], "dp")
    recorder.add(communication.COMM_WAIT_SECONDS, (0.7, 0.4)[number], ("pp", "dp")[number])
    recorder.set(communication.COMM_BUS_BANDWIDTH, (7e9, 6e9)[number], "all_reduce", "dp")
    recorder.set(communication.COMM_LINK_BANDWIDTH, (3e9, 5e9)[number], "dp")
    recorder.set(communication.COMM_LINK_BEST_BANDWIDTH, 4e9, "dp")
    recorder.set(communication.COMM_COVERAGE_RATIO, (0.995, 0.999)[number])
    recorder.set(communication.COMM_VOLUME_RATIO, (1.2, 1.5)[number])
    recorder.add(training.FLOPS, (8e12, 4e12)[number])
    recorder.set(training.PEAK_FLOPS, (4e12, 2e12)[number], "cuda:0")
    recorder.set(memory.MEMORY_HEADROOM, (0.5e9, 1.5e9)[number], "cuda:0")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 1e8 * (1 + number), "cuda:0", "parameters")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 5e8, "cuda:0", "activations")
    recorder.set(memory.MEMORY_BASELINE, 2e8 + number, "cuda:0")
    recorder.set(memory.MEMORY_LEAK, 3e6 if number else 1e6, "cuda:0", "other")
    recorder.add(devices.DEVICE_THROTTLED_SECONDS, 2.0 + number, "cuda:0", "power_cap")
    recorder.add(devices.DEVICE_THROTTLED_SECONDS, 0.125, "cuda:0", "sw_thermal")
    recorder.add(devices.DEVICE_XID_ERRORS, 1.0, "cuda:0", "79")
    recorder.add(devices.DEVICE_ECC_ERRORS, 0.0, "cuda:0", "corrected")
    recorder.add(overhead.WATCH_SECONDS, 0.01 * (1 + number), "hooks")
    recorder.add(overhead.WATCH_SECONDS, 0.06, "watch_thread")
    recorder.add(overhead.DROPPED_RECORDS, 3 + number, "steps")
    recorder.add(overhead.HOOK_FAILURES, 2 + 3 * number, "forward")
    for score in (0.1, 0.04, 0.9):  # the last one is written twice
        recorder.set(communication.STRAGGLER_SCORE, score * (1 - number), "forward")
        recorder.set(communication.STRAGGLER_SCORE, score * number / 10, "data")
        rank.tick()


def compared_runs(folder: Path) -> tuple[Path, Path]:
    """Two runs of 107 steps; in B, each second step takes 0.1 s longer than the others."""

    def record_a(rank: int, step: int) -> StepRecord:
        return step_record(step, loss=float(step), oom_risk_ratio={"cpu": 0.01 + 0.01 * rank})

    def record_b(rank: int, step: int) -> StepRecord:
        forward = 0.1 if step % 2 else 0.2
        phases = {"forward": forward, "backward": 0.26, "optimizer": 0.07, "other": 0.07}
        totals = {
            "all_reduce": CollectiveTotals(
                calls=3, payload_bytes=1000, wire_bytes=1000.0, seconds=0.15
            ),
            "all_gather": CollectiveTotals(
                calls=1, payload_bytes=500, wire_bytes=500.0, seconds=0.05
            ),
        }
        return step_record(
            step,
            seconds=sum(phases.values()) + 0.02,
            phase_seconds={**phases, "eval": 0.02},
            loss=2.0 * step,
            skipped=step > 75,
            collectives=totals,
            comm_seconds=0.2,
            comm_exposed_seconds=0.1,
            comm_exposed_phase_seconds={"backward": 0.08, "eval": 0.02},
            memory_bytes={"cpu": {"allocated": 600e6, "limit": 2e9, "peak_allocated": 975e6}},
            oom_risk_ratio={"cpu": 0.05},
        )

    a = write_run(folder / "before", steps=107, record=record_a, ds_config={"bf16": True})
    b = write_run(folder / "after", steps=107, record=record_b, ds_config={"bf16": False})
    for number, run in enumerate((a, b)):
        with RecordedRank(run) as rank:
            recorder = rank.recorder
            recorder.add(training.STEPS, 10)
            recorder.add(training.PHASE_SECONDS, 5.0, "forward")
            recorder.add(training.FLOPS, (1e12, 1.25e12)[number])
            recorder.set(training.PEAK_FLOPS, 1e12, "cpu")
            recorder.add(communication.COMM_EXPOSED_SECONDS, (0.2, 0.3)[number], "dp")
            cause = ("latency", "bandwidth")[number]
            recorder.add(communication.COMM_CAUSE_SECONDS, (0.2, 0.3)[number], cause)
            recorder.set(communication.STRAGGLER_SCORE, (0.01, 0.03)[number], "data")
            recorder.set(memory.MEMORY_HEADROOM, (1.3e9, 1e9)[number], "cpu")
            recorder.set(memory.MEMORY_CATEGORY_BYTES, (1e8, 2e8)[number], "cpu", "activations")
            recorder.add(overhead.WATCH_SECONDS, 0.01, "hooks")
    return a, b


def eventful_run(folder: Path) -> Path:
    """The uneven run on two hosts, with decisions, an advice, a hang, a restart and damage."""
    uneven_run(folder)
    with RecordedRank(folder, attempt=1, begins_at=600.0) as rank:
        identity = ("run", "0.1.0", "2.13.0", "0.18.9", "nccl", "cuda", "3", "2")
        rank.recorder.set_info(training.RUN_INFO, *identity)
        rank.recorder.set(memory.MEMORY_HEADROOM, 0.5e9, "cuda:0")
        rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 1e9, "cuda:0", "parameters")
        rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 4e8, "cuda:0", "activations")
        rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 8e8, "cuda:0", "other")
        rank.recorder.set(memory.MEMORY_BASELINE, 2e8, "cuda:0")
        rank.recorder.set(memory.MEMORY_LEAK, 5e6, "cuda:0", "other")
    log = folder / "rank-1.jsonl"
    log.write_text(log.read_text().replace("node-0", "node-1") + "damage\n")
    decision = {
        "number": 1,
        "step": 7,
        "changes": [{"knob": "overlap_comm", "before": False, "after": True}],
        "verdict": "accepted",
        "symptom": {"name": "comm_bandwidth"},
        "reason": "faster",
        "numerics": "bitwise",
        "gain": 0.11,
        "lower": 0.08,
        "upper": 0.14,
        "predicted_gain": 0.2,
        "pairs": 6,
        "steps": 48,
        "exploration_seconds": 2.5,
    }
    unbounded = {**decision, "number": 2, "step": 9, "verdict": "rolled_back", "lower": None}
    advice = {**decision, "number": 3, "step": 11, "verdict": "advised", "gain": None}
    lines = "".join(f"{json.dumps(each)}\n" for each in (decision, unbounded, advice))
    (folder / "decisions.jsonl").write_text(lines)
    (folder / "settings.json").write_text(json.dumps({"tuner": {"mode": "auto"}}))
    (folder / "hang-rank-1-1.txt").write_text("rank 1 hangs in <all_reduce>\nits stack\n")
    start = json.dumps({"started_at_unix_seconds": STARTED - 3600.0})
    (folder / "attempts.jsonl").write_text(f"{start}\n")
    return folder
