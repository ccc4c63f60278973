"""Tests of the comparison of two runs; covers `run_comparison.py` and `configuration.py`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_metrics import RecordedRank
from recorded_runs import STARTED, run_of_attempts, step_record, write_run
from uneven_runs import compared_runs

from zerowatch.metrics.catalog import communication, devices, training
from zerowatch.metrics.step_record import CollectiveTotals, StepRecord
from zerowatch.runtime.reports.configuration import RunSource
from zerowatch.runtime.reports.metrics_reader import read_metrics
from zerowatch.runtime.reports.run_comparison import (
    COMPARISON_FIGURES,
    ComparedSteps,
    ComparisonError,
    Measure,
    RunComparison,
    compare,
    read_source,
)
from zerowatch.runtime.reports.run_reader import RunFolderError, read_run
from zerowatch.runtime.reports.run_summary import summarize


def noise(seed: int, size: int) -> list[float]:
    """Noise of 5 % whose successive values resemble each other."""
    values = np.random.default_rng(seed).normal(scale=0.05, size=size)
    for index in range(1, size):
        values[index] += 0.4 * values[index - 1]
    return [float(value) for value in values]


def noisy_run(
    folder: Path,
    seed: int,
    *,
    steps: int = 200,
    backward: float = 0.3,
    ranks: int = 1,
    ds_config: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A run whose steps take 0.2 s and `backward`, with noise in both."""
    forward, other = noise(seed, steps + 1), noise(seed + 10_000, steps + 1)

    def record(rank: int, step: int) -> StepRecord:
        phases = {
            "forward": 0.2 * (1 + forward[step]),
            "backward": backward * (1 + other[step]),
        }
        seconds = sum(phases.values())
        ended_at = STARTED + seed + step * seconds
        return step_record(
            step, seconds=seconds, phase_seconds=phases, ended_at_unix_seconds=ended_at, **more
        )

    return write_run(folder, ranks=ranks, steps=steps, record=record, ds_config=ds_config)


def compare_runs(a: Path, b: Path, *, warm_up: int | None = None) -> RunComparison:
    return compare(read_source(a), read_source(b), warm_up=warm_up)


def measures(comparison: RunComparison) -> dict[str, Measure]:
    return {measure.name: measure for measure in comparison.measures}


@pytest.mark.parametrize(("max_values", "is_longer"), [(20_000, False), (1000, True)])
def test_the_last_loss_of_folded_runs_is_the_mean_of_the_steps_that_its_title_names(
    tmp_path: Path, max_values: int, is_longer: bool
) -> None:
    sources = []
    for name in ("a", "b"):
        folder = write_run(
            tmp_path / name,
            ranks=1,
            steps=1000,
            record=lambda rank, step: step_record(step, loss=step),
        )
        run, metrics = read_run(folder, max_values=max_values), read_metrics(folder)
        sources.append(RunSource(run=run, metrics=metrics, summary=summarize(run, metrics)))
    steps, last = sources[0].run.ranks[0], 1000

    comparison = compare(*sources)

    loss, size = measures(comparison)["loss"], steps.steps_per_row
    assert size > 1
    assert (size > 10) is is_longer
    rows = -(-10 // size)
    assert loss.title == f"loss, mean of the last {rows * size} common steps"
    assert loss.a == pytest.approx(last - rows * size / 2, abs=size)


def test_the_true_ratio_is_within_the_interval_in_nearly_all_runs(tmp_path: Path) -> None:
    true_ratio = 0.5 / 0.53
    inside = found = backward_inside = 0
    for seed in range(40):
        a = noisy_run(tmp_path / f"a{seed}", seed)
        b = noisy_run(tmp_path / f"b{seed}", seed + 100, backward=0.33)
        comparison = compare_runs(a, b)
        figures = comparison.figures
        lower, upper = figures["throughput_ratio_lower"], figures["throughput_ratio_upper"]
        assert lower is not None and upper is not None
        inside += lower < true_ratio < upper
        found += upper < 1
        change = measures(comparison)["phase.backward"].change
        assert change is not None and change.lower is not None and change.upper is not None
        backward_inside += change.lower < 0.03 < change.upper

    assert inside >= 36
    assert backward_inside >= 38
    assert found >= 36


def test_equal_runs_are_rarely_significant(tmp_path: Path) -> None:
    throughput = parts = 0
    for seed in range(40):
        a = noisy_run(tmp_path / f"a{seed}", seed)
        b = noisy_run(tmp_path / f"b{seed}", seed + 100)
        found = [m for m in compare_runs(a, b).measures if m.change and m.change.is_significant]
        throughput += any(m.group == "throughput" for m in found)
        parts += any(m.group != "throughput" for m in found)

    assert throughput <= 5  # 5 % of 40, and two standard deviations
    assert parts <= 5  # of all phases and collectives together


def test_the_verdict_names_the_gain_and_the_phase_that_changed(tmp_path: Path) -> None:
    a = noisy_run(tmp_path / "a", 1, steps=400)
    b = noisy_run(tmp_path / "b", 2, steps=400, backward=0.2)

    comparison = compare_runs(a, b)

    assert comparison.verdict.startswith("B processes 2")
    assert "more tokens per second than A (95 % interval +" in comparison.verdict
    assert "backward takes" in comparison.verdict and "less" in comparison.verdict
    assert "forward" not in comparison.verdict
    assert comparison.figures["throughput_ratio"] == pytest.approx(0.5 / 0.4, rel=0.03)
    assert list(comparison.figures) == list(COMPARISON_FIGURES)


def test_only_common_steps_after_the_warm_up_are_compared(tmp_path: Path) -> None:
    def slow_start(rank: int, step: int) -> StepRecord:
        return step_record(step, seconds=5.0 if step <= 10 else 0.5)

    a = write_run(tmp_path / "a", steps=100, record=slow_start)
    b = write_run(
        tmp_path / "b",
        steps=300,
        record=lambda rank, step: step_record(step, seconds=0.5 if step <= 100 else 3.0),
    )

    comparison = compare_runs(a, b)
    with_warm_up = compare_runs(a, b, warm_up=0)

    assert (comparison.steps.common, comparison.steps.warm_up) == (100, 10)
    assert (comparison.steps.first, comparison.steps.last) == (11, 100)
    assert comparison.figures["step_seconds_ratio"] == pytest.approx(1.0)
    assert with_warm_up.figures["step_seconds_ratio"] == pytest.approx(0.5 / 0.95)
    assert "No significant difference" in comparison.verdict


def test_steps_after_a_restart_are_left_out(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ranks=1, steps=100)
    b = write_run(
        tmp_path / "b",
        ranks=1,
        steps=100,
        record=lambda rank, step: step_record(step, seconds=9.0 if 50 < step <= 55 else 0.5),
    )
    lines = (b / "rank-0.jsonl").read_text().splitlines()
    restarted = [line.replace('"attempt":0', '"attempt":1') for line in lines[50:]]
    (b / "rank-0.jsonl").write_text("\n".join([*lines[:50], *restarted, ""]))

    comparison = compare_runs(a, b)

    assert comparison.figures["step_seconds_ratio"] == pytest.approx(1.0)
    assert comparison.steps.compared == 85


@pytest.mark.parametrize("noted_after", [-20.0, 0.01])
def test_steps_after_a_restart_that_no_launcher_counts_are_left_out(
    tmp_path: Path, noted_after: float
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        pause = 600.0 + 30.0 * min(step - 50, 3) if step > 50 else 0.0
        return step_record(
            step,
            seconds=30.5 if 50 < step <= 53 else 0.5,
            ended_at_unix_seconds=STARTED + 0.5 * step + pause,
        )

    a = write_run(tmp_path / "a", ranks=1, steps=100)
    b = write_run(tmp_path / "b", ranks=1, steps=100, record=record)
    first_ended_at = record(0, 51).ended_at_unix_seconds
    with open(b / "attempts.jsonl", "a") as attempts:
        line = {"started_at_unix_seconds": first_ended_at + noted_after}
        attempts.write(json.dumps(line) + "\n")

    comparison = compare_runs(a, b)

    assert comparison.figures["step_seconds_ratio"] == pytest.approx(1.0)
    assert comparison.steps.compared == 84  # without the step that ended before the note


def test_repeated_steps_are_those_after_a_restart(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", ranks=1, steps=100)
    b = write_run(tmp_path / "b", ranks=1, steps=60)
    repeated = write_run(
        tmp_path / "again",
        ranks=1,
        steps=50,
        record=lambda rank, step: step_record(50 + step, seconds=9.0 if step <= 5 else 0.5),
    )
    with open(b / "rank-0.jsonl", "ab") as log:
        log.write((repeated / "rank-0.jsonl").read_bytes())

    comparison = compare_runs(a, b)

    assert comparison.figures["step_seconds_ratio"] == pytest.approx(1.0)
    assert comparison.steps.compared == 85


def test_the_first_attempt_begins_without_a_restart(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, ranks=1, steps=80) for name in "ab")
    for folder in (a, b):
        line = {"started_at_unix_seconds": STARTED + 0.6}  # noted after the first step
        (folder / "attempts.jsonl").write_text(json.dumps(line))

    assert compare_runs(a, b, warm_up=0).steps.compared == 80


def test_collectives_and_memory_are_compared(tmp_path: Path) -> None:
    def more(rank: int, step: int) -> StepRecord:
        totals = CollectiveTotals(calls=4, payload_bytes=1000, wire_bytes=3000.0, seconds=0.2)
        memory = {"cpu": {"allocated": 600e6, "limit": 2e9, "peak_allocated": 975e6}}
        return step_record(step, collectives={"all_gather": totals}, memory_bytes=memory)

    found = measures(
        compare_runs(
            write_run(tmp_path / "a", steps=80), write_run(tmp_path / "b", steps=80, record=more)
        )
    )

    assert (found["wire_bytes"].a, found["wire_bytes"].b) == (1000, 3000)
    assert found["collective.all_gather.calls"].a == 0
    assert found["collective.all_gather.calls"].b == 4
    change = found["collective.all_gather.seconds"].change
    assert change is not None and change.value == pytest.approx(0.2)
    assert change.is_significant
    peak = found["memory_peak.cpu"].change
    assert peak is not None and peak.value == pytest.approx(0.5)


def test_steps_without_recorded_collectives_do_not_count_as_steps_with_none(
    tmp_path: Path,
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        if step <= 150:
            return step_record(step)
        return step_record(step, collectives={}, comm_seconds=None, comm_exposed_seconds=None)

    a = write_run(tmp_path / "a", steps=200)
    b = write_run(tmp_path / "b", steps=200, record=record)

    comparison = compare_runs(a, b)

    assert comparison.figures["wire_bytes_ratio"] == 1
    found = measures(comparison)
    for name in ("calls", "wire_bytes", "seconds"):
        measure = found[f"collective.all_reduce.{name}"]
        assert measure.a == measure.b


def test_other_batches_are_not_comparable_but_throughput_is(tmp_path: Path) -> None:
    a = noisy_run(tmp_path / "a", 1)
    b = noisy_run(tmp_path / "b", 2, backward=0.5, samples=16, tokens=2048)

    comparison = compare_runs(a, b)

    assert [each.respect for each in comparison.incomparable] == ["batch"]
    assert "samples per step 8 and 16" in comparison.incomparable[0].sentence
    found = measures(comparison)
    for name in ("step_seconds", "phase.backward", "comm_exposed_seconds", "loss"):
        assert found[name].change is None
        assert found[name].not_comparable == "batch"
    assert comparison.figures["step_seconds_ratio"] is None
    assert comparison.figures["throughput_ratio"] == pytest.approx(2 * 0.5 / 0.7, rel=0.05)


@pytest.mark.parametrize(
    ("samples", "differs"), [(8, False), (8.07, False), (8.1, True), (16, True)]
)
def test_a_short_last_batch_of_each_epoch_is_no_other_batch(
    tmp_path: Path, samples: float, differs: bool
) -> None:
    def run(name: str, steps: int, samples: float) -> Path:
        return write_run(
            tmp_path / name,
            steps=steps,
            record=lambda rank, step: step_record(
                step, samples=samples if step % 100 else 5, tokens=None
            ),
        )

    a, b = run("a", 200, 8), run("b", 150, samples)

    respects = [each.respect for each in compare_runs(a, b).incomparable]

    assert respects == (["batch"] if differs else [])


def test_only_the_batches_of_the_compared_steps_count(tmp_path: Path) -> None:
    a, b = (
        write_run(
            tmp_path / name,
            steps=steps,
            record=lambda rank, step: step_record(step, samples=8 if step <= 100 else 64),
        )
        for name, steps in (("a", 100), ("b", 200))
    )

    comparison = compare_runs(a, b)

    assert not comparison.incomparable
    assert comparison.figures["step_seconds_ratio"] == pytest.approx(1.0)


def with_role(folder: Path, role: str) -> Path:
    with RecordedRank(folder, world_size=1) as rank:
        rank.recorder.add(communication.COMM_SECONDS, 1.0, role)
    return folder


def test_ranks_that_share_samples_are_not_compared_with_ranks_that_do_not(tmp_path: Path) -> None:
    a = with_role(noisy_run(tmp_path / "a", 1, ranks=2), "dp")
    b = with_role(noisy_run(tmp_path / "b", 2, ranks=2), "tp")

    comparison = compare_runs(a, b)

    assert [each.respect for each in comparison.incomparable] == ["batch"]
    assert "ranks share samples" in comparison.incomparable[0].sentence
    assert comparison.figures["throughput_ratio"] is None
    assert "cannot be compared" in comparison.verdict


def test_of_ranks_that_share_samples_the_throughput_of_a_rank_is_compared(tmp_path: Path) -> None:
    runs = [
        with_role(noisy_run(tmp_path / name, seed, ranks=2), "tp")
        for seed, name in enumerate(("a", "b"))
    ]

    comparison = compare_runs(*runs)

    tokens = measures(comparison)["tokens_per_second"]
    assert tokens.title == "tokens per second of a rank"
    assert tokens.a == pytest.approx(1024 / 0.5, rel=0.05)
    assert comparison.figures["throughput_ratio"] == pytest.approx(1.0, rel=0.05)


def pipeline(folder: Path, stages: int, *, steps: int = 100, seconds: float = 0.5) -> Path:
    """A run of 4 ranks that process 4096 tokens in a step; only the first stage records them."""

    def record(rank: int, step: int) -> StepRecord:
        tokens = 1024 * stages if rank < 4 // stages else None
        return step_record(step, seconds=seconds, tokens=tokens)

    folder = write_run(folder, ranks=4, steps=steps, record=record)
    return with_role(folder, "pp")


def every_tenth_step(log: Path) -> None:
    """Leave the steps that most ranks of a large job record."""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[9::10]))


def test_tokens_of_a_pipeline_are_those_of_its_first_stage(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", stages=2), pipeline(tmp_path / "b", stages=4, seconds=0.4)

    comparison = compare_runs(a, b)

    tokens = measures(comparison)["tokens_per_second"]
    assert (tokens.a, tokens.b) == pytest.approx((4096 / 0.5, 4096 / 0.4))
    for run, found in ((comparison.a, tokens.a), (comparison.b, tokens.b)):
        assert run.figures["tokens_per_second"] == pytest.approx(found)
    assert comparison.figures["throughput_ratio"] == pytest.approx(1.25)
    assert not any("tokens per step" in each.name for each in comparison.differences)


def test_tokens_of_a_pipeline_whose_ranks_record_every_tenth_step(tmp_path: Path) -> None:
    runs = [
        pipeline(tmp_path / name, stages=2, steps=105, seconds=seconds)
        for name, seconds in (("a", 0.5), ("b", 0.4))
    ]
    for folder in runs:
        for rank in (1, 3):
            every_tenth_step(folder / f"rank-{rank}.jsonl")

    comparison = compare_runs(*runs)

    tokens = measures(comparison)["tokens_per_second"]
    assert comparison.steps.compared == 95
    assert (tokens.a, tokens.b) == pytest.approx((4096 / 0.5, 4096 / 0.4))
    for run, found in ((comparison.a, tokens.a), (comparison.b, tokens.b)):
        assert run.figures["tokens_per_second"] == pytest.approx(found)


def test_ranks_that_left_the_job_add_to_the_throughput_until_then(tmp_path: Path) -> None:
    a = run_of_attempts(tmp_path / "a", (4, 1000))
    b = run_of_attempts(tmp_path / "b", (4, 100), (2, 1000))

    comparison = compare_runs(a, b, warm_up=0)

    tokens = measures(comparison)["tokens_per_second"]
    assert tokens.a == pytest.approx(4 * 1024 / 0.5)
    assert tokens.b == pytest.approx((4 * 100 + 2 * 894) / 994 * 1024 / 0.5)


@pytest.mark.parametrize("kept", [slice(0), slice(50), slice(50, None)])
def test_lost_records_of_a_rank_do_not_change_the_throughput(tmp_path: Path, kept: slice) -> None:
    a, b = (write_run(tmp_path / name, ranks=4, steps=100) for name in "ab")
    log = b / "rank-3.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[kept]))

    comparison = compare_runs(a, b)

    assert comparison.figures["throughput_ratio"] == pytest.approx(1)
    assert not comparison.incomparable


@pytest.mark.parametrize(
    ("of_a", "of_b", "lost", "num_ranks"),
    [
        ([(64, 400)], [(64, 400), (128, 405)], None, 64),
        ([(8, 400)], [(8, 400), (72, 409)], None, 8),
        ([(16, 100), (8, 400)], [(16, 100), (8, 400)], 5, (16 * 60 + 8 * 294) / 354),
        ([(8, 100), (16, 400)], [(8, 100), (16, 400)], 12, (8 * 60 + 16 * 294) / 354),
    ],
)
def test_the_throughput_of_elastic_jobs_is_that_of_the_ranks_of_each_compared_step(
    tmp_path: Path,
    of_a: list[tuple[int, int]],
    of_b: list[tuple[int, int]],
    lost: int | None,
    num_ranks: float,
) -> None:
    a, b = run_of_attempts(tmp_path / "a", *of_a), run_of_attempts(tmp_path / "b", *of_b)
    if lost is not None:
        (b / f"rank-{lost}.jsonl").unlink()

    comparison = compare_runs(a, b)

    tokens = measures(comparison)["tokens_per_second"]
    assert (tokens.a, tokens.b) == pytest.approx((num_ranks * 1024 / 0.5,) * 2)
    assert not any(each.source == "batch" for each in comparison.differences)


def test_steps_that_a_smaller_job_made_are_compared(tmp_path: Path) -> None:
    a = run_of_attempts(tmp_path / "a", (8, 100), (3, 1000))
    b = run_of_attempts(tmp_path / "b", (8, 1000))

    comparison = compare_runs(a, b)

    assert comparison.steps.common == 1000


def test_steps_between_those_of_most_ranks_are_not_compared(tmp_path: Path) -> None:
    a, b = (run_of_attempts(tmp_path / name, (64, 100), (72, 400)) for name in "ab")

    assert compare_runs(a, b).steps.common == 100 + 300 / 10


def test_a_node_that_was_lost_is_no_other_hardware(tmp_path: Path) -> None:
    a = run_of_attempts(tmp_path / "a", (16, 200))
    b = run_of_attempts(tmp_path / "b", (24, 10), (16, 200))

    comparison = compare_runs(a, b)

    assert not comparison.differences
    assert not comparison.incomparable


def with_device(folder: Path, name: str) -> Path:
    with RecordedRank(folder, world_size=1) as rank:
        rank.recorder.set_info(devices.DEVICE_INFO, "cuda:0", "uuid", "0000:01", name, "600")
        rank.tick()
    return folder


def test_other_hardware_is_named(tmp_path: Path) -> None:
    a = with_device(noisy_run(tmp_path / "a", 1), "NVIDIA A100")
    b = with_device(noisy_run(tmp_path / "b", 2, ranks=2), "NVIDIA H100")

    comparison = compare_runs(a, b)

    sentence = comparison.incomparable[0].sentence
    assert comparison.incomparable[0].respect == "hardware"
    assert "ranks 1 and 2" in sentence and "1 x NVIDIA A100 and 1 x NVIDIA H100" in sentence
    assert comparison.verdict.startswith("The hardware differs.")


def test_communication_that_was_not_recorded_is_not_comparable(tmp_path: Path) -> None:
    a, b = noisy_run(tmp_path / "a", 1), noisy_run(tmp_path / "b", 2)
    with RecordedRank(b, world_size=1) as rank:
        rank.recorder.set(communication.COMM_COVERAGE_RATIO, 0.4)
        rank.recorder.add(training.STEPS, 1)
        rank.tick()

    comparison = compare_runs(a, b)

    assert "Only 40 % of the collectives of B" in comparison.incomparable[0].sentence
    assert measures(comparison)["comm_exposed_seconds"].not_comparable == "communication"
    assert measures(comparison)["phase.forward"].change is not None


def test_the_verdict_names_a_slow_rank_and_what_was_changed(tmp_path: Path) -> None:
    a = noisy_run(tmp_path / "a", 1, ranks=2, ds_config={"zero_optimization": {"stage": 2}})
    b = noisy_run(
        tmp_path / "b", 2, ranks=2, backward=0.4, ds_config={"zero_optimization": {"stage": 3}}
    )
    with RecordedRank(b, 1) as rank:
        rank.recorder.set(communication.STRAGGLER_SCORE, 0.4, "data")

    verdict = compare_runs(a, b).verdict

    assert "In B, rank 1 on node-0 was slower than the median rank in data, by 40 %" in verdict
    assert verdict.endswith("What was changed: zero_optimization.stage: 2 -> 3.")


def test_calls_in_flight_at_once_are_named(tmp_path: Path) -> None:
    def run(name: str, seed: int, seconds: float) -> Path:
        totals = CollectiveTotals(calls=9, payload_bytes=90, wire_bytes=90.0, seconds=seconds)
        collectives = {"all_gather": totals}
        return noisy_run(tmp_path / name, seed, comm_seconds=0.1, collectives=collectives)

    a, b, overlapping = run("a", 1, 0.1), run("b", 2, 0.1), run("c", 3, 0.4)

    assert not any("in flight" in note for note in compare_runs(a, b).notes)
    assert any("in flight at the same time" in note for note in compare_runs(a, overlapping).notes)


def test_differences_of_configuration_are_listed(tmp_path: Path) -> None:
    a = write_run(
        tmp_path / "a",
        steps=80,
        settings={"run_id": "x", "tuner": {"mode": "off"}},
        ds_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "bf16": {}},
    )
    b = write_run(
        tmp_path / "b",
        steps=80,
        settings={"run_id": "y", "tuner": {"mode": "auto"}},
        ds_config={"zero_optimization": {"stage": 3, "reduce_bucket_size": 500000000}},
    )

    found = [(d.source, d.name, d.a, d.b) for d in compare_runs(a, b).differences]

    assert found == [
        ("ds config", "zero_optimization.stage", "2", "3"),
        ("ds config", "bf16", "{}", "not set"),
        ("settings", "tuner.mode", "off", "auto"),
    ]


def test_neither_secrets_nor_control_codes_of_a_configuration_are_shown(tmp_path: Path) -> None:
    a = noisy_run(tmp_path / "a", 1, ranks=1)
    b = noisy_run(tmp_path / "b", 2, ranks=1)
    for folder, name in ((a, "ann"), (b, "bob")):
        settings = {"otel": {"endpoint": f"https://{name}:s3cret-{name}@host"}, "label": "\x1b[2J"}
        (folder / "settings.json").write_text(json.dumps({**settings, f"\x1b{name}": 1}))

    found = [str(each) for each in compare_runs(a, b).differences]

    assert not any("s3cret" in each or "\x1b" in each for each in found)
    assert len(found) == 3


def test_a_missing_ds_config_is_named_and_not_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=80, ds_config={"train_batch_size": 8})

    comparison = compare_runs(a, write_run(tmp_path / "b", steps=80))

    assert comparison.differences == ()
    assert "the ds config of B is not recorded, so it is not compared" in comparison.problems


def test_few_steps_have_no_interval(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, steps=30) for name in "ab")
    for name, seconds in (("c", 0.5), ("d", 0.4)):
        write_run(
            tmp_path / name,
            steps=30,
            record=lambda rank, step, seconds=seconds: step_record(step, seconds=seconds),  # type: ignore[misc]
        )
    comparison = compare_runs(tmp_path / "c", tmp_path / "d")

    assert "25 compared steps are too few for an interval" in comparison.verdict
    assert comparison.figures["throughput_ratio"] == pytest.approx(1.25)
    assert comparison.figures["throughput_ratio_lower"] is None
    assert compare_runs(a, b).figures["throughput_ratio"] == pytest.approx(1.0)


def shifted(folder: Path) -> Path:
    return write_run(folder, steps=20, record=lambda rank, step: step_record(step + 500))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (lambda folder: folder, "are the same run"),
        (lambda folder: shutil.copytree(folder, folder.with_name("copy")), "are the same run"),
        (
            lambda folder: write_run(folder.with_name("empty"), steps=0),
            r"\(B\) has no recorded step.*rank-0.jsonl is empty",
        ),
        (
            lambda folder: shifted(folder.with_name("later")),
            "no step in common: A has steps 1 to 80, B has steps 501 to 520",
        ),
        (lambda folder: write_run(folder.with_name("short"), steps=4), "only 4 steps in common"),
    ],
)
def test_runs_that_cannot_be_compared_are_named(
    tmp_path: Path, other: Callable[[Path], Path], expected: str
) -> None:
    a = write_run(tmp_path / "a", steps=80)

    with pytest.raises(ComparisonError, match=expected):
        compare_runs(a, other(a))


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no folder"):
        compare_runs(write_run(tmp_path / "a"), tmp_path / "b")


def test_a_truncated_run_is_compared_and_what_is_missing_is_said(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", steps=100), write_run(tmp_path / "b", steps=100)
    for rank in range(2):
        log = b / f"rank-{rank}.jsonl"
        log.write_bytes(log.read_bytes()[: log.stat().st_size * 9 // 10])

    comparison = compare_runs(a, b)

    assert comparison.steps.common < 100
    assert any(
        problem.startswith("B: rank-0.jsonl: the last line is cut")
        for problem in comparison.problems
    )


Row = tuple[object, ...]


def rows_of(comparison: RunComparison) -> list[Row]:
    """The measures of a comparison, with changes as (value, is relative, bounds, significance)."""
    rows: list[Row] = []
    for each in comparison.measures:
        change: Row | None = None
        if each.change is not None:
            found = each.change
            bounds = None if found.lower is None else (found.lower, found.upper)
            change = (found.value, found.is_relative, bounds, found.is_significant)
        rows.append((each.group, each.name, each.title, each.unit, each.a, each.b, change))
    return rows


def near(value: object) -> object:
    """The same row, of which numbers may differ by rounding to float32."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return pytest.approx(value, rel=1e-6, abs=1e-7)
    return tuple(map(near, value)) if isinstance(value, tuple) else value


# The quantiles of Student's t with 15 degrees of freedom (16 batches) that are exceeded with 2.5 %,
# and with 2.5 % divided by the 9 parts of a step: 5 phases, 2 of communication, 2 operations.
T, T_OF_PARTS = 2.1314495447, 3.2346276695


def test_each_measure_has_its_values_change_and_interval(tmp_path: Path) -> None:
    # Of 96 steps, each deviates by the same from the mean, alternately up and down.
    half = T * (0.05 / 0.55) / math.sqrt(95)
    faster, slower = (0.5 / 0.55, 0.55 / 0.5)
    rate = (
        faster - 1,
        True,
        (faster * math.exp(-half) - 1, faster * math.exp(half) - 1),
        True,
    )
    step = (
        slower - 1,
        True,
        (slower * math.exp(-half) - 1, slower * math.exp(half) - 1),
        True,
    )
    forward = T_OF_PARTS * 0.05 / math.sqrt(95)

    def exactly(change: float) -> Row:
        return change, False, (change, change), change != 0

    def plain(change: float, *, is_relative: bool = False) -> Row:
        return change, is_relative, None, None

    expected: list[Row] = [
        ("tokens_per_second", "tokens per second", "per_second", 4096, 2048 / 0.55, rate),
        ("samples_per_second", "samples per second", "per_second", 32, 16 / 0.55, rate),
        ("step_seconds", "time of a step", "seconds", 0.5, 0.55, step),
        ("step_seconds_p50", "median time of a step", "seconds", 0.5, 0.55, plain(0.05)),
        ("step_seconds_p90", "90 % of steps within", "seconds", 0.5, 0.6, plain(0.1)),
        ("step_seconds_p99", "99 % of steps within", "seconds", 0.5, 0.6, plain(0.1)),
        ("mfu_ratio", "MFU, whole run", "ratio", 0.2, 0.25, plain(0.05)),
        (
            *("phase.forward", "forward", "seconds", 0.1, 0.15),
            (0.05, False, (0.05 - forward, 0.05 + forward), True),
        ),
        ("phase.backward", "backward", "seconds", 0.3, 0.26, exactly(-0.04)),
        ("phase.optimizer", "optimizer", "seconds", 0.05, 0.07, exactly(0.02)),
        ("phase.eval", "eval", "seconds", 0, 0.02, plain(0.02)),
        ("phase.other", "other", "seconds", 0.05, 0.07, exactly(0.02)),
        (
            *("straggler_score_ratio", "lag of the slowest rank, whole run", "ratio"),
            *(0.01, 0.03, plain(0.02)),
        ),
        (
            *("comm_exposed_seconds", "waited for communication", "seconds"),
            *(0.05, 0.08, exactly(0.03)),
        ),
        ("comm_seconds", "a collective in flight", "seconds", 0.125, 0.2, exactly(0.075)),
        ("cause.latency", "cause: latency, whole run", "seconds", 0.05, 0, plain(-0.05)),
        ("cause.bandwidth", "cause: bandwidth, whole run", "seconds", 0, 0.08, plain(0.08)),
        ("wire_bytes", "sent by a rank", "bytes", 1000, 1500, plain(0.5, is_relative=True)),
        ("collective.all_reduce.calls", "all_reduce, calls", "count", 2, 3, plain(1)),
        (
            *("collective.all_reduce.wire_bytes", "all_reduce, sent", "bytes", 1000, 1000),
            plain(0, is_relative=True),
        ),
        (
            *("collective.all_reduce.seconds", "all_reduce, in flight", "seconds", 0.1, 0.15),
            exactly(0.05),
        ),
        ("collective.all_gather.calls", "all_gather, calls", "count", 0, 1, plain(1)),
        ("collective.all_gather.wire_bytes", "all_gather, sent", "bytes", 0, 500, plain(500)),
        (
            *("collective.all_gather.seconds", "all_gather, in flight", "seconds", 0, 0.05),
            exactly(0.05),
        ),
        (
            *("memory_peak.cpu", "highest use of cpu", "bytes", 650e6, 975e6),
            plain(0.5, is_relative=True),
        ),
        ("memory_limit.cpu", "cpu: limit", "bytes", 2e9, 2e9, plain(0, is_relative=True)),
        (
            *("memory_headroom.cpu", "cpu: left at the predicted next peak, at the end", "bytes"),
            *(1.3e9, 1e9, plain(-3 / 13, is_relative=True)),
        ),
        (
            "memory_category.cpu.activations",
            "cpu: activations at a step's peak, at the end",
            *("bytes", 1e8, 2e8, plain(1, is_relative=True)),
        ),
        ("oom_risk_ratio", "highest out-of-memory risk", "ratio", 0.02, 0.05, plain(0.03)),
        (
            *("loss", "loss, mean of the last 10 common steps", "", 102.5, 205),
            plain(1, is_relative=True),
        ),
        ("skipped_ratio", "skipped steps, whole run", "ratio", 0, 32 / 107, plain(32 / 107)),
        ("nonfinite_losses", "steps with nan or inf, whole run", "count", 0, 0, plain(0)),
    ]
    groups = {
        "throughput": 7,
        "phases": 6,
        "communication": 5,
        "collectives": 6,
        "memory": 5,
        "loss": 3,
    }
    titled = [group for group, number in groups.items() for _ in range(number)]

    found = rows_of(compare_runs(*compared_runs(tmp_path)))

    assert found == [near((g, *row)) for g, row in zip(titled, expected, strict=True)]


def test_the_figures_and_the_verdict_are_those_of_the_measures(tmp_path: Path) -> None:
    comparison = compare_runs(*compared_runs(tmp_path))

    half = T * (0.05 / 0.55) / math.sqrt(95)
    assert comparison.figures == pytest.approx(
        {
            "throughput_ratio": 1 / 1.1,
            "throughput_ratio_lower": math.exp(-half) / 1.1,
            "throughput_ratio_upper": math.exp(half) / 1.1,
            "step_seconds_ratio": 1.1,
            "step_seconds_ratio_lower": 1.1 * math.exp(-half),
            "step_seconds_ratio_upper": 1.1 * math.exp(half),
            "comm_exposed_seconds_ratio": 1.6,
            "wire_bytes_ratio": 1.5,
            "memory_peak_bytes_ratio": 1.5,
            "loss_ratio": 2,
            "compared_steps": 96,
            "configuration_differences": 1,
        }
    )
    assert comparison.verdict == (
        "B processes 9.1 % fewer tokens per second than A (95 % interval -10.9 to -7.3 %). Per "
        "step, forward takes 50 ms more, backward takes 40 ms less and waiting for communication "
        "takes 30 ms more. What was changed: bf16: true -> false."
    )
    assert comparison.steps == ComparedSteps(
        common=107, warm_up=11, compared=96, first=12, last=107, steps_per_value=1
    )
    assert comparison.notes == (
        "Steps 12 to 107 of both runs are compared, 96 of 107 common steps; the first 11 and 5 "
        "after each restart are left out as warm-up.",
        "Intervals are of 95 %, by batch means of successive steps; those of phases, communication "
        "and collectives hold together with 95 %.",
        "They cover the variation within these two runs. Two runs of the same configuration can "
        "differ by more, such as on another node: repeat a run to see by how much.",
    )


@pytest.mark.parametrize(("steps", "warm_up"), [(12, 5), (50, 5), (60, 6), (500, 50), (600, 50)])
def test_a_tenth_of_the_common_steps_is_warm_up_from_5_to_50(
    tmp_path: Path, steps: int, warm_up: int
) -> None:
    a, b = (write_run(tmp_path / name, ranks=1, steps=steps) for name in "ab")

    facts = compare_runs(a, b).steps

    assert (facts.common, facts.warm_up, facts.first) == (steps, warm_up, warm_up + 1)


@pytest.mark.parametrize(("ratio", "expected"), [(1.00009, False), (1.00012, True)])
def test_a_change_below_a_ten_thousandth_of_a_step_is_not_significant(
    tmp_path: Path, ratio: float, expected: bool
) -> None:
    a = write_run(tmp_path / "a", ranks=1, steps=80)
    b = write_run(
        tmp_path / "b",
        ranks=1,
        steps=80,
        record=lambda rank, step: step_record(step, seconds=0.5 * ratio),
    )

    change = measures(compare_runs(a, b))["step_seconds"].change

    assert change is not None
    assert change.value == pytest.approx(ratio - 1, rel=1e-2)
    assert change.is_significant is expected


@pytest.mark.parametrize("rank", [None, 1])
def test_a_run_that_diverged_is_not_equal(tmp_path: Path, rank: int | None) -> None:
    """The loss of all ranks is nan from step 60 on, or that of one rank."""

    def diverged(number: int, step: int) -> StepRecord:
        is_bad = step >= 60 and rank in (None, number)
        loss = math.nan if is_bad else 2.0
        return step_record(step, loss=loss, nonfinite_loss=is_bad)

    a = write_run(tmp_path / "a", steps=200, record=lambda rank, step: step_record(step, loss=2.0))
    b = write_run(tmp_path / "b", steps=200, record=diverged)

    comparison = compare_runs(a, b)

    loss, nonfinite = (measures(comparison)[name] for name in ("loss", "nonfinite_losses"))
    assert (loss.a, loss.b, loss.change) == (2.0, None, None)
    assert (nonfinite.a, nonfinite.b) == (0, 141)
    assert comparison.figures["loss_ratio"] is None
    ranks = "ranks 0 to 1" if rank is None else "rank 1"
    assert (
        f"In B, the loss was nan or inf in 141 step(s), first in step 60 on {ranks}."
        in comparison.verdict
    )
    assert not any("losses of all" in note for note in comparison.notes)


def test_losses_that_were_not_finite_long_ago_are_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=200, record=lambda rank, step: step_record(step, loss=2.0))
    b = write_run(
        tmp_path / "b",
        steps=200,
        record=lambda rank, step: step_record(
            step, loss=math.nan if step == 60 else 3.0, nonfinite_loss=step == 60
        ),
    )

    comparison = compare_runs(a, b)

    assert comparison.figures["loss_ratio"] == 1.5
    assert "In B, the loss was nan or inf in 1 step(s)" in comparison.verdict


@pytest.mark.parametrize("losses", [(2.0, -1.0), (-2.0, 1.0), (-2.0, -1.0), (2.0, 0.0)])
def test_losses_that_are_not_above_zero_have_no_ratio(
    tmp_path: Path, losses: tuple[float, float]
) -> None:
    a, b = (
        write_run(
            tmp_path / name,
            ranks=1,
            steps=80,
            record=lambda rank, step, loss=loss: step_record(step, loss=loss),  # type: ignore[misc]
        )
        for name, loss in zip("ab", losses, strict=True)
    )

    comparison = compare_runs(a, b)

    change = measures(comparison)["loss"].change
    assert change is not None and change.value == losses[1] - losses[0]
    assert comparison.figures["loss_ratio"] is None


def test_equal_losses_of_all_common_steps_and_bounds_are_noted(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=80)
    b = write_run(
        tmp_path / "b",
        steps=80,
        record=lambda rank, step: step_record(step, comm_seconds_is_upper_bound=True),
    )

    assert compare_runs(a, b).notes[3:] == (
        "On GPUs, the time of collectives in flight is an upper bound in most steps.",
        "The losses of all 80 common steps are equal.",
    )


def test_other_machines_of_unknown_hardware_are_noted(tmp_path: Path) -> None:
    a, b = noisy_run(tmp_path / "a", 1), noisy_run(tmp_path / "b", 2, ranks=5)
    for rank in range(5):
        log = b / f"rank-{rank}.jsonl"
        log.write_text(log.read_text().replace("node-0", f"node-{rank + 3}"))

    assert (
        "A ran on node-0, B on node-3, node-4, node-5 and 2 more; whether these machines are equal "
        "is not recorded."
    ) in compare_runs(a, b).notes


@pytest.mark.parametrize(("verdict", "is_noted"), [("advised", False), ("accepted", True)])
def test_trials_of_the_tuner_are_noted_and_advice_is_not(
    tmp_path: Path, verdict: str, is_noted: bool
) -> None:
    a, b = (write_run(tmp_path / name, steps=80) for name in "ab")
    decision = {
        "number": 1,
        "step": 9,
        "changes": [{"knob": "python_gc", "before": True, "after": False}],
        "verdict": verdict,
        "symptom": {"name": "host_bound"},
        "reason": "",
        "numerics": "",
    }
    (b / "decisions.jsonl").write_text(json.dumps(decision))

    comparison = compare_runs(a, b)

    noted = [note for note in comparison.notes if note.startswith("The tuner made trials")]
    assert bool(noted) is is_noted
    changed = [(each.source, each.name, each.a, each.b) for each in comparison.differences]
    text = "python_gc true -> false at step 9"
    assert changed == ([("tuner", "python_gc", "not set", text)] if is_noted else [])


def test_without_samples_and_tokens_the_steps_per_second_are_compared(tmp_path: Path) -> None:
    a, b = (
        write_run(
            tmp_path / name,
            steps=80,
            record=lambda rank, step, seconds=seconds: step_record(  # type: ignore[misc]
                step, seconds=seconds, samples=None, tokens=None
            ),
        )
        for name, seconds in (("a", 0.5), ("b", 0.25))
    )

    comparison = compare_runs(a, b)

    rate = measures(comparison)["steps_per_second"]
    assert (rate.title, rate.a, rate.b) == ("steps per second", 2, 4)
    assert comparison.figures["throughput_ratio"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("tokens", "differs"), [(1024 * 0.951, False), (1024 * 0.949, True), (1024 / 0.949, True)]
)
def test_tokens_that_vary_by_a_twentieth_are_no_other_batch(
    tmp_path: Path, tokens: float, differs: bool
) -> None:
    a = write_run(tmp_path / "a", steps=80)
    b = write_run(
        tmp_path / "b", steps=80, record=lambda rank, step: step_record(step, tokens=tokens)
    )

    respects = [each.respect for each in compare_runs(a, b).incomparable]

    assert respects == (["batch"] if differs else [])


def test_a_slow_rank_of_both_runs_is_not_in_the_verdict(tmp_path: Path) -> None:
    runs = [noisy_run(tmp_path / name, seed, ranks=2) for seed, name in enumerate("ab")]
    for folder, score in zip(runs, (0.4, 0.5), strict=True):
        with RecordedRank(folder, 1) as rank:
            rank.recorder.set(communication.STRAGGLER_SCORE, score, "data")

    assert "rank 1" not in compare_runs(*runs).verdict


def test_values_of_other_types_and_software_are_differences(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=80, ds_config={"x": 1, "size": 1e6, "rate": 0.1234567891})
    b = write_run(
        tmp_path / "b", steps=80, ds_config={"x": True, "size": 1_000_000, "rate": [1, 2]}
    )
    for folder, version in ((a, "0.18"), (b, "0.19")):
        with RecordedRank(folder) as rank:
            identity = ("run", "1.0", "2.9", version, "gloo", "cpu", "2", "2")
            rank.recorder.set_info(training.RUN_INFO, *identity)

    comparison = compare_runs(a, b)

    assert [(d.source, d.name, d.a, d.b) for d in comparison.differences] == [
        ("software", "deepspeed", "0.18", "0.19"),
        ("ds config", "x", "1", "true"),
        ("ds config", "rate", "0.123457", "[1,2]"),
    ]
    assert comparison.verdict.endswith(
        "What was changed: deepspeed: 0.18 -> 0.19, x: 1 -> true, rate: 0.123457 -> [1,2]."
    )
