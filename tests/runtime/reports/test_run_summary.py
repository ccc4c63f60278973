"""Tests of the figures, findings and verdict of a recorded run."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_metrics import RecordedRank
from recorded_runs import STARTED, elastic_run, run_of_attempts, step_record, write_run
from uneven_runs import uneven_run

from zerowatch.metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.common.exit_notes import AFTER_FIRST, FAILED, FIRST_TO_FAIL
from zerowatch.runtime.common.report_files import utc_text
from zerowatch.runtime.reports import run_summary
from zerowatch.runtime.reports.end_tables import print_end_tables
from zerowatch.runtime.reports.metrics_reader import read_metrics
from zerowatch.runtime.reports.run_reader import MAX_REPORT_BYTES, MAX_VALUES, read_run
from zerowatch.runtime.reports.run_summary import (
    FIGURES,
    Finding,
    RunSummary,
    TimeShare,
    TunerDecision,
    percent,
    summarize,
    summary_of,
)
from zerowatch.runtime.reports.write_report import Form, make_report

FORMS: tuple[Form, ...] = ("html", "markdown", "json")


def names_of(summary: RunSummary) -> list[str]:
    return [finding.name for finding in summary.findings]


def record_metrics(recorder: Recorder, *, straggler: float = 0.0) -> None:
    """Ten steps of 0.5 s, of which 1 s was exposed communication."""
    recorder.add(training.STEPS, 10)
    for phase, seconds in {"forward": 1.0, "backward": 3.0, "optimizer": 0.5, "other": 0.5}.items():
        recorder.add(training.PHASE_SECONDS, seconds, phase)
    recorder.add(communication.COMM_EXPOSED_SECONDS, 1.0, "dp")
    recorder.add(communication.COMM_WAIT_SECONDS, 0.25, "dp")
    recorder.add(communication.COMM_CAUSE_SECONDS, 0.7, "imbalance")
    recorder.add(communication.COMM_CAUSE_SECONDS, 0.2, "bandwidth")
    recorder.set(communication.STRAGGLER_SCORE, straggler, "forward")
    recorder.set(communication.STRAGGLER_SCORE, 0.0, "backward")
    recorder.add(training.FLOPS, 1e12)
    recorder.set(training.PEAK_FLOPS, 1e12, "cpu")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 100e6, "cpu", "activations")
    recorder.set(memory.MEMORY_CATEGORY_BYTES, 50e6, "cpu", "parameters")
    recorder.set(memory.MEMORY_BASELINE, 500e6, "cpu")
    recorder.set(memory.MEMORY_HEADROOM, 1.3e9, "cpu")
    recorder.add(overhead.WATCH_SECONDS, 0.05, "hooks")


def test_the_bubble_of_a_pipeline_is_the_wait_of_its_stages(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step, comm_exposed_seconds=0.2, comm_exposed_phase_seconds={"backward": 0.2}
        )

    folder = write_run(tmp_path / "run", record=record)
    for number, wait in enumerate((0.5, 1.5)):
        with RecordedRank(folder, number) as rank:
            record_metrics(rank.recorder)
            rank.recorder.add(communication.COMM_WAIT_SECONDS, wait, "pp")

    summary = summary_of(folder)

    assert summary.figures["pipeline_bubble_ratio"] == pytest.approx(2.0 / 10.0)
    assert "gradient_accumulation_steps" in summary.findings[0].advice


@pytest.mark.parametrize("label", ["phase", "category", "state", "symptom", "group", "device"])
def test_a_log_with_a_damaged_label_has_a_summary(tmp_path: Path, label: str) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 0) as rank:
        record_metrics(rank.recorder)
        rank.recorder.set(memory.MEMORY_LEAK, 1e6, "cpu", "other")
        rank.recorder.set(tuner.TUNER_STATE, 1, "observe")
        rank.recorder.set(tuner.TUNER_SYMPTOM, 0.5, "data_bound")
        rank.recorder.set(communication.COMM_LINK_BANDWIDTH, 1e9, "dp")
        rank.recorder.set(communication.COMM_LINK_BEST_BANDWIDTH, 2e9, "dp")
        rank.recorder.set(devices.DEVICE_LOST, 1, "cpu")
    log = folder / "metrics-0.jsonl"
    text = log.read_text()
    log.write_text(re.sub(rf"\b{label}\b", f"{label[:-1]} ", text))

    summary = summary_of(folder)

    assert log.read_text() != text
    assert summary.figures["steps"] == 10


def test_a_job_without_stages_has_no_bubble(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 0) as rank:
        record_metrics(rank.recorder)

    assert summary_of(folder).figures["pipeline_bubble_ratio"] is None


def test_equal_losses_on_all_ranks_are_the_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 0) as rank:
        record_metrics(rank.recorder)
        rank.recorder.set(across_ranks.RANKS_SAME_LOSS, 1)

    summary = summary_of(folder)

    (finding,) = [each for each in summary.findings if each.name == "same_losses"]
    assert finding.severity == "warning"  # a loss over the batches of all ranks is equal, too
    assert "contrastive" in finding.advice
    assert "same samples" in summary.verdict


def test_times_are_shares_of_the_training_time_of_all_ranks(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            seconds=1.0,
            phase_seconds={"forward": 0.2, "backward": 0.3, "eval": 0.5},
            comm_exposed_seconds=0.2,
            comm_exposed_phase_seconds={"backward": 0.1, "eval": 0.1},
            comm_seconds=None,
        )

    summary = summary_of(write_run(tmp_path / "run", record=record))

    assert [(share.name, pytest.approx(share.ratio)) for share in summary.phases] == [
        ("backward", 0.6),
        ("forward", 0.4),
        ("eval", 0.5),  # of wall time
    ]
    assert summary.phases[0].seconds == pytest.approx(3.0)
    assert summary.phases[0].seconds_per_step == pytest.approx(0.3)
    figures = summary.figures
    assert figures["comm_exposed_ratio"] == pytest.approx(0.2)  # without that of the evaluation
    assert figures["comm_ratio"] is None
    assert figures["step_seconds"] == pytest.approx(0.5)
    assert figures["samples_per_second"] == pytest.approx(2 * 8 / 0.5)


def test_steps_with_unknown_communication_do_not_lower_its_share(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        known = step_record(step)
        return known if step % 2 else step_record(step, comm_exposed_seconds=None, loss=None)

    summary = summary_of(write_run(tmp_path / "run", record=record))

    assert summary.figures["comm_exposed_ratio"] == pytest.approx(0.1)


def test_causes_split_the_exposed_time_of_the_steps_as_the_metrics_do(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            record_metrics(rank.recorder)
            rank.tick()

    summary = summary_of(folder)

    assert {share.name: pytest.approx(share.seconds) for share in summary.causes} == {
        "imbalance": 0.35,
        "bandwidth": 0.1,
        "latency": 0.0,
        "redundancy": 0.0,
        "unknown": 0.05,
    }
    assert sum(share.ratio for share in summary.causes) == pytest.approx(0.1)
    assert summary.figures["comm_exposed_ratio"] == pytest.approx(0.1)
    assert summary.figures["imbalance_ratio"] == pytest.approx(0.07)
    assert summary.figures["mfu_ratio"] == pytest.approx(0.2)
    assert summary.figures["monitoring_ratio"] == pytest.approx(0.01)
    (cpu,) = summary.memory
    assert cpu.categories == {"baseline": 500e6, "activations": 100e6, "parameters": 50e6}
    assert cpu.peak_ratio == pytest.approx(650e6 / 2e9)
    assert summary.figures["memory_headroom_ratio"] == pytest.approx(1.3 / 2)
    assert summary.ranks[0].wait_ratio == pytest.approx(0.05)


def test_the_verdict_names_the_largest_share_and_its_main_cause(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", record=lambda rank, step: step_record(step, comm_exposed_seconds=0.15)
    )
    with RecordedRank(folder, 0) as rank:
        record_metrics(rank.recorder)
    with RecordedRank(folder, 1) as rank:
        record_metrics(rank.recorder, straggler=0.12)

    summary = summary_of(folder)

    assert "30 %" in summary.verdict and "another rank was late" in summary.verdict
    assert names_of(summary) == ["exposed_comm", "straggler"]
    straggler = summary.findings[1].sentence
    assert "Rank 1" in straggler and "forward" in straggler and "12 %" in straggler
    assert summary.ranks[1].straggler_phase == "forward"


def test_a_run_of_an_older_zerowatch_has_unknown_causes_and_says_so(tmp_path: Path) -> None:
    summary = summary_of(write_run(tmp_path / "run"))

    assert summary.causes == ()
    assert summary.figures["imbalance_ratio"] is None
    assert any("metrics" in problem for problem in summary.problems)


def test_thresholds_of_the_run_replace_the_defaults(tmp_path: Path) -> None:
    settings = {"alerts": {"thresholds": {"exposed_comm_ratio_high": 0.5}}}
    record = lambda rank, step: step_record(step, comm_exposed_seconds=0.2)  # noqa: E731

    usual = summary_of(write_run(tmp_path / "usual", record=record))
    tolerant = summary_of(write_run(tmp_path / "tolerant", record=record, settings=settings))

    assert names_of(usual) == ["exposed_comm"]
    assert names_of(tolerant) == []
    assert "Nothing holds this run back" in tolerant.verdict


def test_each_problem_of_a_step_log_is_found(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            phase_seconds={"data": 0.3, "forward": 0.1, "checkpoint": 0.1},
            nonfinite_loss=step == 3,
            skipped=step > 2,
        )

    summary = summary_of(write_run(tmp_path / "run", record=record))

    found = names_of(summary)
    assert found[:2] == ["nonfinite_losses", "skipped_steps"]
    assert {"data", "checkpoints"} <= set(found)
    assert summary.figures["nonfinite_losses"] == 1
    assert "nan or inf in 1 step" in summary.verdict


def test_the_reason_of_the_end_is_read_from_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number, reason in enumerate(("peer_failed", "out_of_memory")):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set_info(training.RUN_END_INFO, reason)
    (folder / "oom").mkdir()
    (folder / "oom/rank-1-1.txt").write_text("out of memory on cuda:0 in forward of step 10\n")

    summary = summary_of(folder)

    assert summary.status == "out_of_memory"
    assert summary.verdict == "Out of memory on cuda:0 in forward of step 10."
    assert summary.incidents[0].path == "oom/rank-1-1.txt"


def test_an_interrupted_run_has_its_last_step_though_steps_are_missing(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step if step <= 20 else 2_000)

    folder = write_run(tmp_path / "run", steps=21, record=record)
    with RecordedRank(folder, 0) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "interrupted")

    verdict = summary_of(folder).verdict

    assert verdict.startswith("Interrupted after 2,000 steps, of which 21 are recorded. ")


def test_an_interrupted_run_has_its_last_step_though_a_restart_repeated_some(
    tmp_path: Path,
) -> None:
    folder = elastic_run(tmp_path / "run")
    with RecordedRank(folder, 0, begins_at=300.0) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "interrupted")

    verdict = summary_of(folder).verdict

    assert verdict.startswith(
        "Interrupted after step 200; 210 steps are recorded, as restarts repeat some. "
    )


@pytest.mark.parametrize(
    ("category", "advice"),
    [("other", "memory.trace_leaks"), ("activations", "smaller micro-batches")],
)
def test_the_advice_on_a_full_memory_depends_on_what_fills_it(
    tmp_path: Path, category: str, advice: str
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, oom_risk_ratio={"cpu": 0.9})

    folder = write_run(tmp_path / "run", record=record)
    with RecordedRank(folder, 0) as rank:
        rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 1e9, "cpu", category)
        rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 1e6, "cpu", "parameters")
        rank.recorder.set(memory.MEMORY_BASELINE, 2e9, "cpu")

    [finding] = [each for each in summary_of(folder).findings if each.name == "oom_risk"]

    assert advice in finding.advice


def test_without_calls_of_unknown_wait_rounding_is_no_cause(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 0) as rank:
        record_metrics(rank.recorder)
        rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.1 - 1e-12, "latency")

    seconds = {cause.name: cause.seconds for cause in summary_of(folder).causes}

    assert seconds["unknown"] == 0


def test_without_metrics_the_files_show_how_the_run_ended(tmp_path: Path) -> None:
    completed = write_run(tmp_path / "completed")
    killed = write_run(tmp_path / "killed")
    (killed / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    (killed / "exits").mkdir()
    (killed / "exits/rank-0-killed.txt").write_text("rank 0 was killed\n")
    unknown = write_run(tmp_path / "unknown")
    (unknown / "targets.json").unlink()

    statuses = [summary_of(folder).status for folder in (completed, killed, unknown)]

    assert statuses == ["completed", "killed", "unknown"]
    assert "does not show how" in summary_of(unknown).verdict


def test_before_the_next_start_the_launchers_notes_show_how_the_run_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=40)
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    (folder / "exits").mkdir()
    texts = (f"{FIRST_TO_FAIL}, by SIGKILL", f"was ended, {AFTER_FIRST}0 had exited by SIGKILL")
    for rank, text in enumerate(texts):
        note = json.dumps({"text": text, "may_be_oom_kill": rank == 0})
        path = folder / f"exits/rank-{rank}-{100 + rank}-7-launcher.note.json"
        path.write_text(note)
        os.utime(path, (STARTED + 21, STARTED + 21))

    summary = summary_of(folder)

    assert summary.status == "killed"
    assert summary.figures["exit_reports"] == 2
    assert summary.verdict.startswith("Rank 0 was the first") and "after step 40" in summary.verdict
    assert "note.json" not in summary.findings[0].advice
    assert "such reports" not in summary.findings[0].sentence, "the other rank's end is no such one"


@pytest.mark.parametrize("reason", ["completed", "exception"])
def test_a_note_on_a_host_that_never_returned_is_of_its_own_time(
    tmp_path: Path, reason: str
) -> None:
    folder = run_of_attempts(tmp_path / "run", (2, 100), (2, 400))
    (folder / "exits").mkdir()
    note = folder / "exits/rank-1-101-7-launcher.note.json"
    note.write_text(json.dumps({"text": f"{FIRST_TO_FAIL}, by SIGKILL", "may_be_oom_kill": True}))
    os.utime(note, (STARTED + 51, STARTED + 51))
    with RecordedRank(folder, 0, begins_at=500.0) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, reason)

    summary = summary_of(folder)

    [finding] = [each for each in summary.findings if each.name == "exit"]
    assert finding.severity == "warning"
    assert finding.sentence.endswith("by SIGKILL, after step 100. The run trained on.")
    assert utc_text(STARTED + 51) in summary.incidents[0].text
    assert ("ended by an exception" in summary.verdict) is (reason == "exception")


@pytest.mark.parametrize(
    ("seconds", "last"),
    [(1e6, "after step 40"), (1e15, "after step 40"), (0.25, "before its first record")],
)
def test_a_note_with_the_time_of_a_copy_is_of_the_last_step(
    tmp_path: Path, seconds: float, last: str
) -> None:
    folder = write_run(tmp_path / "run", steps=40)
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    (folder / "exits").mkdir()
    note = folder / "exits/rank-1-101-7-launcher.note.json"
    note.write_text(json.dumps({"text": FIRST_TO_FAIL, "may_be_oom_kill": True}))
    try:
        os.utime(note, (STARTED + seconds, STARTED + seconds))
    except OverflowError:
        pytest.skip("the file system has no such times")

    summary = summary_of(folder)

    assert summary.status == "killed"
    assert summary.incidents[0].headline.endswith(last)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [((0, 1), "ranks 0 to 1 were killed, or are"), ((1,), "rank 1 was killed, or is")],
)
def test_ranks_that_have_not_closed_are_named_if_the_end_is_unknown(
    ranks: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    for rank in ranks:
        (folder / f"rank-{rank}.alive.json").write_text("{}")

    verdict = summary_of(folder).verdict

    assert verdict.startswith(f"The folder does not show how the run ended: {said}")


def test_a_note_that_a_start_has_reported_is_no_second_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "exits").mkdir()
    (folder / "exits/rank-0-100-7-launcher.note.json").write_text('{"text": "exited"}')
    (folder / "exits/rank-0-100-7.life.json").write_text("{}")
    (folder / "exits/rank-0-killed.txt").write_text("rank 0 exited\n")

    assert summary_of(folder).figures["exit_reports"] == 1


def test_the_advice_on_the_cost_of_monitoring_is_on_the_settings_that_cost_most(
    tmp_path: Path,
) -> None:
    own_process = {"profile": {"every_steps": 0}, "process": {"separate": True}}
    folders = [
        write_run(tmp_path / f"run-{number}", settings=settings)
        for number, settings in enumerate(
            [{"profile": {"every_steps": 0}}, {"profile": {"every_steps": 10}}, own_process]
        )
    ]
    for folder in folders:
        with RecordedRank(folder) as rank:
            record_metrics(rank.recorder)
            rank.recorder.add(overhead.WATCH_SECONDS, 1.0, "hooks")

    advice = [
        next(f.advice for f in summary_of(folder).findings if f.name == "monitoring_cost")
        for folder in folders
    ]

    assert "few milliseconds" in advice[0]
    assert "profile.every_steps" in advice[1]
    assert "process.separate" in advice[2]


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_the_advice_on_a_slow_rank_is_on_the_phase_in_which_it_is_slow(
    tmp_path: Path, phase: str
) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 1) as rank:
        rank.recorder.set(communication.STRAGGLER_SCORE, 0.4, phase)

    summary = summary_of(folder)

    slow = next(finding for finding in summary.findings if finding.name == "straggler")
    assert ("data loader" in slow.advice) == (phase == "data")


def test_a_locked_folder_is_of_an_active_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with open(folder / "run.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        script = (
            "import sys; from pathlib import Path\n"
            "from zerowatch.runtime.reports.run_summary import summary_of\n"
            "summary = summary_of(Path(sys.argv[1]))\n"
            "print(summary.status, summary.verdict)"
        )

        answer = subprocess.run(
            [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
        )

    assert answer.stdout.startswith("running The run is active, but its last recorded step ended ")


def test_restarts_are_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with open(folder / "attempts.jsonl", "a") as file:
        file.write(json.dumps({"started_at_unix_seconds": 1_790_000_100.0}) + "\n")

    summary = summary_of(folder)

    assert summary.figures["attempts"] == 2
    assert names_of(summary) == ["restarts"]


def test_an_empty_run_has_a_verdict_and_all_figures(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")

    summary = summary_of(tmp_path)

    assert "No step was recorded" in summary.verdict
    assert list(summary.figures) == list(FIGURES)
    assert summary.figures["step_seconds"] is None


def test_decisions_have_their_proof_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    decision = {
        "number": 1,
        "step": 105,
        "changes": [{"knob": "overlap_comm", "before": False, "after": True}],
        "verdict": "accepted",
        "symptom": {"name": "comm_bandwidth", "ratio": 0.3},
        "reason": "",
        "numerics": "bitwise",
        "gain": 0.11,
        "lower": 0.08,
        "upper": 0.14,
        "pairs": 6,
        "steps": 48,
        "exploration_seconds": 2.5,
    }
    (folder / "decisions.jsonl").write_text(f'{json.dumps(decision)}\n{{"schema": 99}}\n')

    (found,) = summary_of(folder).tuner.decisions

    assert found.change == "overlap_comm false -> true"
    assert (found.gain, found.lower, found.upper, found.pairs) == (0.11, 0.08, 0.14, 6)


def test_collectives_of_evaluation_are_part_of_wall_time(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            seconds=1.0,
            phase_seconds={"forward": 0.2, "eval": 0.8},
            comm_seconds=0.6 if step % 2 else None,
        )

    summary = summary_of(write_run(tmp_path / "run", record=record))

    assert summary.figures["comm_ratio"] == pytest.approx(0.6)


def test_the_memory_of_every_rank_counts(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        peak = 1.5e9 if rank == 0 else 1.4e9
        return step_record(
            step,
            memory_bytes={"cuda:0": {"allocated": 1e9, "limit": 2e9, "peak_allocated": peak}},
            oom_risk_ratio={"cuda:0": 0.0 if rank == 0 else 0.9},
        )

    folder = write_run(tmp_path / "run", record=record)
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set(memory.MEMORY_HEADROOM, 0.4e9 if number else 0.6e9, "cuda:0")
            if number:
                rank.recorder.set(memory.MEMORY_LEAK, 2e6, "cuda:0", "other")

    summary = summary_of(folder)

    assert summary.memory[0].rank == 0  # the fullest
    assert summary.figures["oom_risk_ratio"] == pytest.approx(0.9)
    assert summary.figures["memory_headroom_ratio"] == pytest.approx(0.2)
    found = {finding.name: finding.sentence for finding in summary.findings}
    assert "cuda:0 of rank 1 had a probability of 90 %" in found["oom_risk"]
    assert "cuda:0 of rank 1 grew" in found["memory_leak"]


def test_quantiles_of_means_of_several_steps_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=400)
    long = summarize(read_run(folder, max_values=2000), read_metrics(folder))

    assert summary_of(folder).figures["step_seconds_p99"] is not None
    assert long.figures["step_seconds_p99"] is None
    assert long.figures["step_seconds"] == pytest.approx(0.5)


def test_ranks_that_record_every_tenth_step_do_not_distort_the_shares(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        if step % 50:
            return step_record(step)
        return step_record(step, seconds=2.5, phase_seconds={"forward": 0.5, "eval": 2.0})

    folder = write_run(tmp_path / "run", ranks=8, steps=100, record=record)
    for rank in range(1, 8):
        log = folder / f"rank-{rank}.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[9::10]))

    summary = summary_of(folder)

    seconds = {share.name: share.seconds for share in summary.phases}
    assert seconds["backward"] == pytest.approx(98 * 0.3)
    assert {share.name: share.ratio for share in summary.phases}["eval"] == pytest.approx(4 / 54)
    assert summary.figures["samples_per_second"] == pytest.approx(8 * 8 / 0.5)


@pytest.mark.parametrize("steps", [15, 109])
def test_ranks_that_record_every_tenth_step_add_their_whole_throughput(
    tmp_path: Path, steps: int
) -> None:
    folder = write_run(tmp_path / "run", ranks=8, steps=steps)
    for rank in range(1, 8):
        log = folder / f"rank-{rank}.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[9::10]))

    assert summary_of(folder).figures["samples_per_second"] == pytest.approx(8 * 8 / 0.5)


def test_a_gap_in_the_log_of_a_rank_lowers_no_throughput(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=4, steps=200)
    log = folder / "rank-3.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:50] + lines[150:]))

    figures = summary_of(folder).figures

    assert figures["tokens_per_second"] == pytest.approx(4 * 1024 / 0.5)


def test_a_rank_adds_to_the_throughput_while_it_is_part_of_the_job(tmp_path: Path) -> None:
    # Ranks 2 and 3 make steps 1 to 100. The others go on from the checkpoint of step 50, more
    # slowly.
    folder = write_run(tmp_path / "run", ranks=4, steps=100)
    resumed = write_run(
        tmp_path / "resumed",
        steps=950,
        record=lambda rank, step: step_record(50 + step, seconds=1.0),
    )
    for rank in range(2):
        with open(folder / f"rank-{rank}.jsonl", "ab") as log:
            log.write((resumed / f"rank-{rank}.jsonl").read_bytes())

    figures = summary_of(folder).figures

    work, seconds = 100 * 4 * 1024 + 950 * 2 * 1024, 100 * 0.5 + 950 * 1.0
    assert figures["tokens_per_second"] == pytest.approx(work / seconds)


@pytest.mark.parametrize(
    ("steps", "lost", "notes"),
    [
        (9, [8, 24, 40, 56, 72, 88], ["6 of 96 ranks have a log"]),
        (9, [], ["12 of 96 ranks have a log"]),
        (
            10,
            [],
            [
                "84 of 96 ranks record every tenth step: a loss of nan or inf on one of them in "
                "the steps between is not recorded"
            ],
        ),
    ],
)
def test_before_the_tenth_step_a_note_says_how_many_ranks_have_a_log(
    tmp_path: Path, steps: int, lost: list[int], notes: list[str]
) -> None:
    folder = run_of_attempts(tmp_path / "run", (96, steps))
    for rank in lost:
        (folder / f"rank-{rank}.jsonl").unlink()

    assert [note.partition(".")[0] for note in summary_of(folder).notes] == notes


def test_ranks_of_a_node_that_was_lost_for_a_while_add_nothing_meanwhile(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (16, 100), (8, 900), (16, 1000))

    figures = summary_of(folder).figures

    expected = (16 * 200 + 8 * 800) * 1024 / 500
    assert figures["tokens_per_second"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "attempts",
    [
        [(64, 100), (128, 109)],
        [(64, 40), (128, 49)],
        [(128, 9), (64, 60)],
        [(8, 400), (72, 409)],
        [(64, 400), (128, 1000)],
    ],
)
def test_steps_of_a_large_job_that_most_ranks_do_not_record_are_counted(
    tmp_path: Path, attempts: list[tuple[int, int]]
) -> None:
    figures = summary_of(run_of_attempts(tmp_path / "run", *attempts)).figures

    (before, first), (after, last) = attempts
    num_ranks = (before * first + after * (last - first)) / last
    assert figures["tokens_per_second"] == pytest.approx(num_ranks * 1024 / 0.5)
    assert figures["samples_per_second"] == pytest.approx(num_ranks * 8 / 0.5)


def test_the_tokens_of_a_pipeline_with_fewer_ranks_later_are_those_of_its_first_stage(
    tmp_path: Path,
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, tokens=1024 if rank < (4 if step <= 50 else 2) else None)

    folder = run_of_attempts(tmp_path / "run", (8, 50), (4, 100), record=record)

    assert summary_of(folder).figures["tokens_per_second"] == pytest.approx(3 * 1024 / 0.5)


def test_rows_of_several_steps_weigh_as_much_as_their_steps(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (8, 400), (4, 800))
    run = read_run(folder)
    folded = read_run(folder, max_values=200 * len(run.ranks[0].columns) * 8)
    assert folded.ranks[0].steps_per_row > 1 == run.ranks[7].steps_per_row

    mixed = replace(run, ranks={**run.ranks, **{rank: folded.ranks[rank] for rank in range(4)}})

    figures = summarize(mixed, read_metrics(folder)).figures
    assert figures["samples_per_second"] == pytest.approx(6 * 8 / 0.5)


def test_a_rank_without_a_log_is_counted_like_the_others(tmp_path: Path) -> None:
    short = run_of_attempts(tmp_path / "short", (72, 9))  # no step that most ranks record
    lost = run_of_attempts(tmp_path / "lost", (16, 100), (8, 400))
    for rank in (5, 8, 9, 10):
        (lost / f"rank-{rank}.jsonl").unlink()

    rates = [summary_of(folder).figures["tokens_per_second"] for folder in (short, lost)]

    assert rates == pytest.approx([72 * 1024 / 0.5, (16 * 100 + 8 * 300) * 1024 / 200])


@pytest.mark.parametrize(
    ("role", "samples", "tokens"),
    [("dp", 32.0, 4096.0), ("pp", None, 4096.0), ("tp", None, None), ("sp", None, None)],
)
def test_ranks_that_share_samples_have_no_sum_of_samples(
    tmp_path: Path, role: str, samples: float | None, tokens: float | None
) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder) as rank:
        rank.recorder.add(communication.COMM_SECONDS, 1.0, role)

    figures = summary_of(folder).figures

    assert (figures["samples_per_second"], figures["tokens_per_second"]) == (samples, tokens)


def test_steps_with_unknown_samples_do_not_lower_the_throughput(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step) if step % 2 else step_record(step, samples=None, tokens=None)

    figures = summary_of(write_run(tmp_path / "run", record=record)).figures

    assert figures["samples_per_second"] == pytest.approx(2 * 8 / 0.5)
    assert figures["tokens_per_second"] == pytest.approx(2 * 1024 / 0.5)


def test_a_rank_that_a_restart_left_out_does_not_decide_how_the_run_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with open(folder / "attempts.jsonl", "a") as file:
        file.write(json.dumps({"started_at_unix_seconds": STARTED + 90.0}) + "\n")
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set_info(training.RUN_END_INFO, "exception")
    with RecordedRank(folder, attempt=1, world_size=1, begins_at=100.0) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "completed")

    assert summary_of(folder).status == "completed"


def test_the_newest_report_is_named_whatever_its_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "exits").mkdir()
    for at, (rank, text) in enumerate(((2, "rank 2 was killed"), (10, "rank 10 was killed"))):
        path = folder / f"exits/rank-{rank}-killed.txt"
        path.write_text(text)
        os.utime(path, (STARTED + at, STARTED + at))

    assert summary_of(folder).findings[0].sentence == "Rank 10 was killed. (2 such reports)"


@pytest.mark.parametrize(
    "change",
    [
        {"gain": "much"},
        {"pairs": None},
        {"exploration_seconds": []},
        {"symptom": "comm"},
        {"number": 1e999},
        {"number": 2**64 + 1},
    ],
)
def test_a_decision_with_values_of_other_types_is_left_out(
    tmp_path: Path, change: dict[str, object]
) -> None:
    folder = write_run(tmp_path / "run")
    decision = {
        "number": 1,
        "step": 5,
        "changes": [],
        "verdict": "accepted",
        "symptom": {"name": "data"},
        "reason": "",
        "numerics": "",
    }
    (folder / "decisions.jsonl").write_text(json.dumps({**decision, **change}) + "\n")

    summary, _ = make_report(folder)

    assert summary.tuner.decisions == ()


def test_no_text_of_a_run_folder_sends_codes_to_a_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", settings={"tuner": {"mode": "\x1b[2J"}})
    (folder / "oom").mkdir()
    (folder / "oom/rank-0-\x1b[2J.txt").write_text("\x1b]0;title\x07out of memory\x9b2J")
    log = folder / "rank-0.jsonl"
    log.write_text(log.read_text().replace("node-0", "node\\u001b[2J"))
    printed = io.StringIO()

    summary, markdown = make_report(folder, "markdown")
    print_end_tables(summary, printed)

    for text in (summary.verdict, markdown, printed.getvalue()):
        assert not any(code in text for code in "\x1b\x07\x9b")


def test_names_that_are_not_utf_8_are_reported(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    write_run(tmp_path / "run").rename(folder)
    (folder / "oom").mkdir()
    (folder / os.fsdecode(b"oom/rank-0-\xe9.txt")).write_text("out of memory")

    for form in FORMS:
        summary, text = make_report(folder, form)
        text.encode()

    assert summary.incidents[0].path == "oom/rank-0- .txt"


def test_a_lock_that_is_a_fifo_is_no_lock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    os.mkfifo(folder / "run.lock")

    assert summary_of(folder).status == "completed"


def test_the_loss_is_the_mean_of_all_ranks_at_the_end(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, loss=10.0 * (rank + 1) - step)

    folder = write_run(tmp_path / "run", ranks=2, steps=10, record=record)

    assert summary_of(folder).figures["loss"] == pytest.approx((0.0 + 10.0) / 2)


def test_time_outside_of_the_passes_is_a_finding(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, phase_seconds={"forward": 0.1, "other": 0.4})

    summary = summary_of(write_run(tmp_path / "run", record=record))

    assert names_of(summary)[0] == "other"
    assert "80 %" in summary.findings[0].sentence


def test_the_verdict_on_a_run_that_generates_has_the_time_of_it(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, phase_seconds={"forward": 0.1, "generate": 0.4})

    verdict = summary_of(write_run(tmp_path / "run", record=record)).verdict

    assert "20 % of its time, generation 80 %" in verdict


def test_waits_for_other_ranks_are_not_time_outside_of_the_passes(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        phases = {"forward": 0.1, "other": 0.4}
        waited = {"other": 0.3}
        return step_record(
            step,
            phase_seconds=phases,
            comm_exposed_seconds=0.3,
            comm_exposed_phase_seconds=waited,
        )

    summary = summary_of(write_run(tmp_path / "run", record=record))

    assert "other" not in names_of(summary)


@pytest.mark.parametrize(("steps", "expected"), [(50, False), (100, True)])
def test_few_steps_have_no_slowest_hundredth(tmp_path: Path, steps: int, expected: bool) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, seconds=5.0 if step > steps - 2 else 0.5)

    summary = summary_of(write_run(tmp_path / "run", steps=steps, record=record))

    assert ("stalls" in names_of(summary)) is expected


@pytest.mark.parametrize(("is_training_run", "mode"), [(False, "advise"), (True, "auto")])
def test_only_a_training_run_has_the_tuner_in_the_mode_auto(
    tmp_path: Path, is_training_run: bool, mode: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "settings.json").write_text(json.dumps({"tuner": {"mode": "auto"}}))
    with RecordedRank(folder, 0) as rank:
        rank.recorder.set(tuner.TUNER_STATE, 1, "observe")
        if is_training_run:
            rank.recorder.start_counters(window.ON_RANK_ZERO)

    assert summary_of(folder).tuner.mode == mode


TRAINING = (54.2, 48.0)  # seconds of the ranks of `uneven_run`, without evaluation and checkpoints


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return summary_of(uneven_run(tmp_path_factory.mktemp("uneven") / "run"))


def test_each_figure_of_a_run_is_that_of_its_logs(uneven: RunSummary) -> None:
    training_time = sum(TRAINING)

    assert uneven.figures == pytest.approx(
        {
            "steps": 20,
            "seconds": 56.2,  # of rank 0, the first of those with the most steps
            "step_seconds": training_time / 40,
            "step_seconds_p50": 1.66 + 0.1 * 10.5,
            "step_seconds_p90": 1.66 + 0.1 * 18.1,
            "step_seconds_p99": 1.66 + 0.1 * 19.81,
            "samples_per_second": 160 / 54.2 + 120 / 48,
            "tokens_per_second": 20_000 / 54.2 + 10_000 / 48,
            "mfu_ratio": (8 / 4 / 4 + 4 / 6 / 2) / 2,
            "comm_ratio": (14 + 16) / (56.2 + 50),
            "comm_exposed_ratio": (8 + 4) / training_time,
            "imbalance_ratio": 0.3 * (8 + 4) / training_time,
            "latency_ratio": 0.2 * (8 + 4) / training_time,
            "redundancy_ratio": 0.05 * (8 + 4) / training_time,
            "bandwidth_ratio": 0.25 * (8 + 4) / training_time,
            "pipeline_bubble_ratio": 0.7 / 6,
            "data_ratio": 8 / training_time,
            "forward_ratio": 14 / training_time,
            "backward_ratio": 40 / training_time,
            "optimizer_ratio": 6 / training_time,
            "generate_ratio": 7.2 / training_time,
            "other_ratio": 27 / training_time,
            "eval_ratio": 1.6 / 106.2,
            "checkpoint_ratio": 2.4 / 106.2,
            "comm_wire_bytes_per_step": (1500 + 2500 + 20 + 8000) / 2,
            "comm_volume_ratio": 1.5,
            "comm_coverage_ratio": 0.995,
            "link_bandwidth_ratio": 0.75,
            "memory_peak_ratio": 3.02 / 4,
            "memory_headroom_ratio": 0.125,
            "oom_risk_ratio": 0.3,
            "device_utilization_ratio": 0.625,
            "device_temperature_celsius": 90,
            "straggler_score_ratio": 0.5,
            "loss": (80.5 + 30.5) / 2,
            "same_losses": None,
            "gradient_norm_max": 4.5,  # of rank 0
            "skipped_ratio": 0.1,
            "nonfinite_losses": 2,
            "out_of_memory_reports": 0,
            "hang_reports": 0,
            "exit_reports": 0,
            "attempts": 1,
            "monitoring_ratio": 0.15 / 17,
            "dropped_records": 7,
            "hook_failures": 7,
            "problems": 0,
        }
    )


def test_shares_of_time_are_sorted_and_have_means_per_rank_and_step(uneven: RunSummary) -> None:
    def rows(shares: tuple[TimeShare, ...]) -> list[tuple[str, object]]:
        return [
            (each.name, pytest.approx((each.seconds, each.seconds_per_step))) for each in shares
        ]

    assert rows(uneven.phases) == [
        ("backward", (20, 1.0)),
        ("other", (13.5, 0.675)),
        ("forward", (7, 0.35)),
        ("data", (4, 0.2)),
        ("generate", (3.6, 0.18)),
        ("optimizer", (3, 0.15)),
        ("checkpoint", (1.2, 0.06)),
        ("eval", (0.8, 0.04)),
    ]
    assert rows(uneven.causes) == [
        ("imbalance", (1.8, 0.09)),
        ("bandwidth", (1.5, 0.075)),
        ("latency", (1.2, 0.06)),
        ("redundancy", (0.3, 0.015)),
        ("unknown", (1.2, 0.06)),
    ]


def test_collectives_are_means_over_ranks_with_the_most_sent_first(uneven: RunSummary) -> None:
    found = [
        (
            each.op,
            each.calls_per_step,
            each.payload_bytes_per_step,
            each.wire_bytes_per_step,
            pytest.approx(each.seconds_per_step),
            each.bandwidth,
        )
        for each in uneven.collectives
    ]

    assert found == [
        ("all_gather", 2.5, 50, 4000, 0.2, None),
        ("all_reduce", 2.5, 1500, 2000, 0.2, 6e9),
        ("broadcast", 0.5, 5, 10, None, None),
    ]


def test_the_memory_of_a_run_is_that_of_the_fullest_rank_gpus_first(uneven: RunSummary) -> None:
    gpu, cpu = uneven.memory

    assert (gpu.device, gpu.kind, gpu.rank) == ("cuda:0", "cuda", 0)
    assert (gpu.peak_bytes, gpu.limit_bytes, gpu.headroom_bytes) == (3.02e9, 4e9, 0.5e9)
    assert (gpu.risk_ratio, gpu.highest_risk_ratio) == pytest.approx((0.01, 0.3))
    assert list(gpu.categories.items()) == [
        ("activations", 5e8),
        ("baseline", 2e8),
        ("parameters", 1e8),
    ]
    assert gpu.leak_bytes_per_step == {"other": 1e6}
    assert (cpu.device, cpu.peak_bytes, cpu.limit_bytes) == ("cpu", 600e6, 2e9)
    assert (cpu.headroom_bytes, cpu.risk_ratio, cpu.highest_risk_ratio) == (None, None, None)


def test_devices_have_the_extremes_of_all_ranks_and_events_once(uneven: RunSummary) -> None:
    gpu, cpu = uneven.devices

    assert (gpu.device, cpu.device) == ("cuda", "cpu")
    assert gpu.readings["utilization_ratio"] == pytest.approx((0.4, 0.625, 0.85))
    assert gpu.readings["temperature_celsius"] == pytest.approx((61, 75.5, 90))
    assert gpu.events == {"throttled seconds, sw_thermal": 0.25, "XID errors, 79": 2.0}
    assert cpu.events == {}


def test_each_rank_has_its_own_row(uneven: RunSummary) -> None:
    def row(rank: int) -> tuple[object, ...]:
        each = uneven.ranks[rank]
        figures = (
            each.step_seconds,
            each.exposed_ratio,
            each.wait_ratio,
            each.data_ratio,
            each.memory_peak_ratio,
            each.oom_risk_ratio,
            each.utilization_ratio,
            each.mfu_ratio,
            each.straggler_score,
        )
        return each.rank, each.steps, each.last_step, each.straggler_phase, pytest.approx(figures)

    assert row(0) == (
        *(0, 20, 20, "forward"),
        (2.71, 8 / 54.2, 0.7 / 6, 2 / 54.2, 0.755, 0.3, 0.5, 0.5, 0.5),
    )
    assert row(1) == (
        *(1, 20, 20, "data"),
        (2.4, 4 / 48, 0.05, 0.125, 0.505, 0.03, 0.75, 1 / 3, 0.05),
    )


def test_the_cost_of_monitoring_is_per_rank_and_what_is_lost_is_of_all(uneven: RunSummary) -> None:
    cost = uneven.monitoring

    assert list(cost.seconds.items()) == [
        ("watch_thread", pytest.approx(0.06)),
        ("hooks", pytest.approx(0.015)),
    ]
    assert (cost.dropped, cost.hook_failures) == ({"steps": 7}, {"forward": 5 + 2})


def test_a_run_without_noted_attempts_starts_with_its_first_step(uneven: RunSummary) -> None:
    facts = uneven.facts

    assert facts.world_size == 2 and facts.hosts == ("node-0",)
    # The first step of rank 1 took 2.5 s, and that of rank 0 1.86 s.
    assert facts.started == pytest.approx(STARTED + 0.5 - 2.5, rel=0, abs=1e-3)
    assert facts.ended == STARTED + 10


def run_at_limits(folder: Path, limits: Mapping[str, float]) -> Path:
    """A run whose figures are exact: each is equal to the value of `AT_LIMITS`."""

    def record(rank: int, step: int) -> StepRecord:
        return step_record(
            step,
            phase_seconds={"data": 0.125, "forward": 0.25, "other": 0.125},
            comm_exposed_seconds=0.1875,
            comm_exposed_phase_seconds={"forward": 0.1875},
            skipped=step % 2 == 0,
            oom_risk_ratio={"cuda:0": 0.5 if rank else 0.25},
            memory_bytes={"cuda:0": {"allocated": 1e9, "limit": 2e9}},
            device_readings={"cuda:0": {"utilization_ratio": 0.875}},
        )

    write_run(folder, record=record, settings={"alerts": {"thresholds": limits}})
    with RecordedRank(folder, 0) as rank:
        rank.recorder.add(training.STEPS, 10)
        rank.recorder.add(training.PHASE_SECONDS, 4.0, "forward")
        rank.recorder.add(communication.COMM_EXPOSED_SECONDS, 1.5, "dp")
        rank.recorder.add(communication.COMM_CAUSE_SECONDS, 1.0, "latency")
        rank.recorder.set(communication.COMM_COVERAGE_RATIO, 0.75)
        rank.recorder.set(communication.COMM_LINK_BANDWIDTH, 2e9, "dp")
        rank.recorder.set(communication.COMM_LINK_BEST_BANDWIDTH, 4e9, "dp")
        rank.recorder.set(communication.STRAGGLER_SCORE, 0.125, "data")
        rank.recorder.add(devices.DEVICE_THROTTLED_SECONDS, 2.0, "cuda:0", "hw_thermal")
        rank.recorder.add(devices.DEVICE_XID_ERRORS, 3.0, "cuda:0", "79")
        rank.recorder.add(overhead.WATCH_SECONDS, 1.0, "hooks")
    return folder


AT_LIMITS = {
    "skipped_ratio_high": 0.5,
    "comm_coverage_low": 0.75,
    "exposed_comm_ratio_high": 0.375,
    "link_bandwidth_low": 0.5,
    "straggler_score_high": 0.125,
    "oom_risk_high": 0.5,
    "data_ratio_high": 0.25,
    "device_utilization_low": 0.875,
    "throttled_ratio_high": 0.5,
    "watch_ratio_high": 0.25,
}


THROTTLED_SENTENCE = (
    "The clock of cuda:0 of rank 0 on here was lowered 50 % of the time (hw_thermal)."
)
XID_SENTENCE = "XID 79 on cuda:0 of rank 0 on here: 3 times."


def test_a_figure_at_its_limit_is_no_finding_but_a_risk_and_throttling_are(tmp_path: Path) -> None:
    summary = summary_of(run_at_limits(tmp_path / "run", AT_LIMITS))

    sentences = [finding.sentence for finding in summary.findings]
    assert sentences == [
        XID_SENTENCE,
        THROTTLED_SENTENCE,
        "At the end, cuda:0 of rank 1 had a probability of 50 % to run out of memory within 50 "
        "steps.",
    ]


def test_just_above_its_limit_neither_a_risk_nor_throttling_is_a_finding(tmp_path: Path) -> None:
    limits = {**AT_LIMITS, "oom_risk_high": 0.501, "throttled_ratio_high": 0.501}

    summary = summary_of(run_at_limits(tmp_path / "run", limits))

    assert [finding.sentence for finding in summary.findings] == [XID_SENTENCE]


def test_figures_beyond_their_limits_are_findings_by_severity_and_cost(tmp_path: Path) -> None:
    limits = {
        name: value + (0.001 if name.endswith("_low") else -0.001)
        for name, value in AT_LIMITS.items()
    }

    summary = summary_of(run_at_limits(tmp_path / "run", limits))

    found = [
        (each.severity, each.name, pytest.approx(each.cost_ratio), each.sentence)
        for each in summary.findings
    ]
    assert found == [
        (
            "critical",
            "skipped_steps",
            0,
            "50 % of the steps were skipped by gradient overflow.",
        ),
        ("critical", "device_events", 0, XID_SENTENCE),
        ("warning", "device_events", 0.5, THROTTLED_SENTENCE),
        (
            "warning",
            "exposed_comm",
            0.375,
            "Training waited for communication 38 % of its time, mostly because each call has a "
            "fixed cost.",
        ),
        ("warning", "data", 0.25, "Training waited for data 25 % of its time."),
        (
            "warning",
            "straggler",
            0.125,
            "Rank 0 on node-0 was slower than the median rank in data, by 12 % of a step.",
        ),
        ("warning", "device_idle", 0.0625, "The GPUs were busy 88 % of the time."),
        (
            "warning",
            "comm_coverage",
            0,
            "Only 75 % of the collectives were recorded, so communication takes more time than "
            "shown.",
        ),
        (
            "warning",
            "link_bandwidth",
            0,
            "At the end, a link had 50 % of the best bandwidth that it has sustained.",
        ),
        (
            "warning",
            "oom_risk",
            0,
            "At the end, cuda:0 of rank 1 had a probability of 50 % to run out of memory within "
            "50 steps.",
        ),
        ("info", "monitoring_cost", 0.25, "Monitoring took 25 % of the ranks' time."),
    ]
    xid, throttled = (each for each in summary.findings if each.name == "device_events")
    assert "cooling" in throttled.advice and "runbook" in xid.advice
    assert summary.verdict == "50 % of the steps were skipped by gradient overflow."


def run_with_events(
    folder: Path,
    events: Mapping[int, Sequence[tuple[MetricSpec, float, tuple[str, ...]]]],
    *,
    ranks: int = 8,
    seconds: float = 300.0,
) -> RunSummary:
    """A run on nodes of 8 ranks whose devices have counted events, by rank.

    In jobs of more than 64 ranks, one rank per node writes a metrics log.
    """
    run_of_attempts(folder, (ranks, 60))
    for number in range(0, ranks, 8 if ranks > 64 else 1):
        with RecordedRank(folder, number, world_size=ranks, local_rank=number % 8) as rank:
            rank.recorder.add(training.PHASE_SECONDS, seconds, "forward")
            for spec, value, labels in events.get(number, ()):
                rank.recorder.add(spec, value, f"cuda:{number % 8}", *labels)
    return summary_of(folder)


def device_sentences(summary: RunSummary) -> list[str]:
    return [each.sentence for each in summary.findings if each.name == "device_events"]


def test_the_power_cap_of_a_gpu_at_full_load_is_no_finding(tmp_path: Path) -> None:
    capped = {
        rank: [(devices.DEVICE_THROTTLED_SECONDS, 240.0, ("power_cap",))] for rank in range(8)
    }

    summary = run_with_events(tmp_path / "run", capped)

    assert device_sentences(summary) == []
    assert "Nothing holds this run back" in summary.verdict


def test_one_hot_gpu_of_many_is_named_with_its_own_share(tmp_path: Path) -> None:
    hot = {
        3: [(devices.DEVICE_THROTTLED_SECONDS, 225.0, ("hw_thermal",))],
        5: [(devices.DEVICE_THROTTLED_SECONDS, 3.0, ("hw_thermal",))],
    }

    summary = run_with_events(tmp_path / "run", hot)

    assert device_sentences(summary) == [
        "The clock of cuda:3 of rank 3 on here was lowered 75 % of the time (hw_thermal)."
    ]


def test_hot_gpus_of_a_large_job_are_found_by_the_ranks_with_metrics(tmp_path: Path) -> None:
    hot = {
        rank: [(devices.DEVICE_THROTTLED_SECONDS, 150.0 + rank, ("sw_thermal",))]
        for rank in range(0, 72, 8)
    }

    [sentence] = device_sentences(run_with_events(tmp_path / "run", hot, ranks=72))

    assert sentence == (
        "The clock of cuda:0 of rank 64 on here was lowered 71 % of the time (sw_thermal), and "
        "that of 8 more GPUs."
    )


@pytest.mark.parametrize(
    ("spec", "count", "labels", "severity"),
    [
        (devices.DEVICE_ECC_ERRORS, 1000, ("corrected",), None),
        (devices.DEVICE_ECC_ERRORS, 1, ("uncorrected",), "critical"),
        (devices.DEVICE_LINK_ERRORS, 40, ("pcie", "replay"), None),  # 8 per minute
        (devices.DEVICE_LINK_ERRORS, 41, ("pcie", "replay"), "warning"),
        (devices.DEVICE_LINK_ERRORS, 30_000, ("nvlink", "crc"), None),  # 100 per second
        (devices.DEVICE_LINK_ERRORS, 30_001, ("nvlink", "crc"), "warning"),
        (devices.DEVICE_LINK_ERRORS, 1, ("nvlink", "replay"), "warning"),
        (devices.DEVICE_LINK_ERRORS, 1, ("nvlink", "recovery"), "warning"),
        (devices.DEVICE_XID_ERRORS, 1, ("79",), "critical"),
        (devices.DEVICE_XID_ERRORS, 1, ("31",), "warning"),
        (devices.DEVICE_XID_ERRORS, 1, ("a number",), "warning"),
        (devices.DEVICE_LOST, 1, (), "critical"),
        (devices.DEVICE_ROW_REMAP, 1, ("failed",), "critical"),
        (devices.DEVICE_ROW_REMAP, 1, ("pending",), "warning"),
    ],
)
def test_errors_of_a_gpu_are_findings_by_the_limits_of_the_alerts(
    tmp_path: Path,
    spec: MetricSpec,
    count: float,
    labels: tuple[str, ...],
    severity: str | None,
) -> None:
    summary = run_with_events(tmp_path / "run", {2: [(spec, count, labels)]})

    found = [each for each in summary.findings if each.name == "device_events"]
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    assert all("cuda:2 of rank 2 on here" in each.sentence for each in found)


def test_a_fault_names_the_host_on_which_it_was(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (2, 40), (2, 80))
    for begins_at in (0.0, 60.0):
        with RecordedRank(folder, 1, begins_at=begins_at) as rank:
            rank.recorder.add(training.PHASE_SECONDS, 20.0, "forward")
            if not begins_at:
                rank.recorder.add(devices.DEVICE_XID_ERRORS, 2, "cuda:1", "79")
    log = folder / "metrics-1.jsonl"
    log.write_text(log.read_text().replace('"here"', '"faulty"', 1))

    [sentence] = device_sentences(summary_of(folder))

    assert sentence == "XID 79 on cuda:1 of rank 1 on faulty: 2 times. The run trained on."


def run_with_restart(
    folder: Path,
    before: Sequence[tuple[MetricSpec, float, tuple[str, ...]]],
    after: Sequence[tuple[MetricSpec, float, tuple[str, ...]]] = (),
    *,
    steps_after: int = 40,
    last_rank: int = 1,
) -> RunSummary:
    """A run of 2 ranks whose rank 1 has readings of its GPU before and after a restart."""
    run_of_attempts(folder, (2, 40), (2, 40 + steps_after))
    for number, readings in ((0, ()), (1, before)):
        with RecordedRank(folder, number) as rank:
            rank.recorder.add(training.PHASE_SECONDS, 20.0, "forward")
            for spec, value, labels in readings:
                rank.recorder.add(spec, value, f"cuda:{number}", *labels)
    for number, readings in ((0, ()), (1, after))[: last_rank + 1]:
        with RecordedRank(folder, number, attempt=1, begins_at=90.0) as rank:
            rank.recorder.add(training.PHASE_SECONDS, 20.0, "forward")
            for spec, value, labels in readings:
                rank.recorder.add(spec, value, f"cuda:{number}", *labels)
    return summary_of(folder)


LOST, XID_79 = (devices.DEVICE_LOST, 1.0, ()), (devices.DEVICE_XID_ERRORS, 1.0, ("79",))


@pytest.mark.parametrize("last_rank", [0, 1])
def test_a_gpu_that_an_earlier_attempt_has_lost_is_a_warning(
    tmp_path: Path, last_rank: int
) -> None:
    summary = run_with_restart(tmp_path / "run", [LOST, XID_79], last_rank=last_rank)

    found = [each for each in summary.findings if each.name == "device_events"]
    assert [each.severity for each in found] == ["warning", "warning"]
    assert all(each.sentence.endswith(". The run trained on.") for each in found)
    assert all("Have the node checked" in each.advice for each in found)


@pytest.mark.parametrize(
    ("after", "steps_after"),
    [
        ((LOST, XID_79), 40),  # lost again
        ((), 0),  # the last attempt made no step
    ],
)
def test_a_lost_gpu_with_which_the_run_has_not_trained_on_is_critical(
    tmp_path: Path, after: Sequence[tuple[MetricSpec, float, tuple[str, ...]]], steps_after: int
) -> None:
    summary = run_with_restart(tmp_path / "run", [LOST, XID_79], after, steps_after=steps_after)

    found = [each for each in summary.findings if each.name == "device_events"]
    assert [each.severity for each in found] == ["critical", "critical"]
    assert not any("trained on" in each.sentence for each in found)


def test_uncorrected_memory_errors_of_an_earlier_attempt_are_critical(tmp_path: Path) -> None:
    """A checkpoint may hold what they have changed."""
    error = (devices.DEVICE_ECC_ERRORS, 1.0, ("uncorrected",))

    summary = run_with_restart(tmp_path / "run", [error])

    assert [each.severity for each in summary.findings][:1] == ["critical"]
    assert summary.findings[0].name == "device_events"


@pytest.mark.parametrize(("later", "num_found"), [(1.0, 1), (0.0, 0)])
def test_a_row_that_is_to_be_replaced_is_that_of_the_last_process_of_a_rank(
    tmp_path: Path, later: float, num_found: int
) -> None:
    """The GPU was reset between two attempts, or was not."""
    remap = devices.DEVICE_ROW_REMAP
    summary = run_with_restart(
        tmp_path / "run", [(remap, 1.0, ("pending",))], [(remap, later, ("pending",))]
    )

    assert len(device_sentences(summary)) == num_found
    assert all(
        "next reset on cuda:1 of rank 1 on here" in each for each in device_sentences(summary)
    )


def test_a_gpu_whose_memory_is_worn_out_is_found_once(tmp_path: Path) -> None:
    remap = devices.DEVICE_ROW_REMAP
    summary = run_with_events(
        tmp_path / "run",
        {
            1: [(remap, 1.0, ("failed",)), (remap, 1.0, ("pending",))],
            2: [(remap, 1.0, ("pending",))],
            3: [(remap, 1.0, ("pending",))],
        },
    )

    failed, pending = device_sentences(summary)
    assert "could not be replaced on cuda:1 of rank 1 on here." in failed
    assert pending.endswith("next reset on cuda:2 of rank 2 on here, and on 1 more GPU.")


def test_a_worn_out_gpu_that_a_restart_has_left_behind_is_a_warning(tmp_path: Path) -> None:
    """A reset ends a pending replacement, but not a failed one."""
    remap = devices.DEVICE_ROW_REMAP
    before = [(remap, 1.0, ("failed",)), (remap, 1.0, ("pending",))]

    summary = run_with_restart(tmp_path / "run", before)

    [finding] = [each for each in summary.findings if each.name == "device_events"]
    assert finding.severity == "warning"
    assert "could not be replaced on cuda:1 of rank 1 on here" in finding.sentence
    assert finding.sentence.endswith(". The run trained on.")


def test_a_gpu_whose_state_two_attempts_report_is_counted_once(tmp_path: Path) -> None:
    readings = [LOST, XID_79, (devices.DEVICE_ROW_REMAP, 1.0, ("failed",))]

    summary = run_with_restart(tmp_path / "run", readings, readings)

    [device] = summary.devices
    assert device.events == {"XID errors, 79": 2, "row remaps, failed": 1, "lost": 1}


@pytest.mark.parametrize("spec", [devices.DEVICE_LOST, devices.DEVICE_ROW_REMAP])
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("is_same_card", "sentences"),
    [(True, ["of rank {1} on here."]), (False, ["of rank {1} on here.", "of rank {0} on here."])],
)
def test_a_card_that_a_restart_gives_to_another_rank_is_counted_once(
    tmp_path: Path,
    spec: MetricSpec,
    ranks: tuple[int, int],
    is_same_card: bool,
    sentences: Sequence[str],
) -> None:
    folder = run_of_attempts(tmp_path / "run", (2, 40), (2, 80))
    labels = ("failed",) if spec is devices.DEVICE_ROW_REMAP else ()
    for attempt, faulty in enumerate(ranks):
        for number in range(2):
            with RecordedRank(folder, number, attempt=attempt, begins_at=90.0 * attempt) as rank:
                rank.recorder.add(training.PHASE_SECONDS, 20.0, "forward")
                if number == faulty:
                    uuid = f"GPU-{0 if is_same_card else attempt}"
                    rank.recorder.set_info(
                        devices.DEVICE_INFO, f"cuda:{number}", uuid, "0000:18:00.0", "H100", "570"
                    )
                    rank.recorder.set(spec, 1.0, f"cuda:{number}", *labels)

    summary = summary_of(folder)

    found = [each for each in summary.findings if each.name == "device_events"]
    assert [each.severity for each in found] == ["critical", "warning"][: len(sentences)]
    for each, text in zip(found, sentences, strict=True):
        assert text.format(*ranks) in each.sentence
    assert sum(summary.devices[0].events.values()) == len(sentences)


def test_two_ranks_with_a_card_each_of_the_same_name_have_lost_two(tmp_path: Path) -> None:
    """Each rank sees only its own card, as with CUDA_VISIBLE_DEVICES."""
    folder = run_of_attempts(tmp_path / "run", (2, 40))
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            rank.recorder.add(training.PHASE_SECONDS, 20.0, "forward")
            rank.recorder.set_info(
                devices.DEVICE_INFO, "cuda:0", f"GPU-{number}", "0000:18:00.0", "H100", "570"
            )
            rank.recorder.set(devices.DEVICE_LOST, 1.0, "cuda:0")

    [sentence] = device_sentences(summary_of(folder))

    assert sentence == "The driver lost cuda:0 of rank 0 on here, and 1 more GPU."


def test_lost_gpus_are_counted_in_one_sentence(tmp_path: Path) -> None:
    lost = [(devices.DEVICE_LOST, 1.0, ())]

    summary = run_with_events(tmp_path / "run", {1: lost, 2: lost, 3: lost})

    [sentence] = device_sentences(summary)
    assert sentence == "The driver lost cuda:1 of rank 1 on here, and 2 more GPUs."


def exposed_finding(
    folder: Path, causes: Mapping[str, float], *, volume: float | None = None, stage: str = "2"
) -> Finding:
    """The finding on a run that waits for communication half of its time."""
    write_run(folder, record=lambda rank, step: step_record(step, comm_exposed_seconds=0.25))
    with RecordedRank(folder, 0) as rank:
        rank.recorder.add(training.STEPS, 10)
        rank.recorder.add(training.PHASE_SECONDS, 4.0, "forward")
        rank.recorder.add(communication.COMM_EXPOSED_SECONDS, 2.0, "dp")
        identity = ("run", "1.0", "2.9", "0.18", "gloo", "cpu", stage, "2")
        rank.recorder.set_info(training.RUN_INFO, *identity)
        for cause, seconds in causes.items():
            rank.recorder.add(communication.COMM_CAUSE_SECONDS, seconds, cause)
        if volume is not None:
            rank.recorder.set(communication.COMM_VOLUME_RATIO, volume)
    [finding] = (each for each in summary_of(folder).findings if each.name == "exposed_comm")
    return finding


@pytest.mark.parametrize(
    ("causes", "why"),
    [
        ({}, ""),
        ({"imbalance": 1.125}, ", mostly because another rank was late"),
        ({"latency": 1.0}, ", for the largest part because each call has a fixed cost"),
        (
            {"redundancy": 1.0, "latency": 0.25},
            ", for the largest part because more was sent than the ZeRO stage needs",
        ),
        (
            {"redundancy": 0.75, "latency": 0.25},
            ", for the largest part because of calls whose wait was not measured",
        ),
        ({"bandwidth": 1.5, "imbalance": 0.25}, ", mostly because the link was busy"),
    ],
)
def test_the_main_cause_of_waiting_is_named_with_its_extent(
    tmp_path: Path, causes: dict[str, float], why: str
) -> None:
    finding = exposed_finding(tmp_path / "run", causes)

    assert finding.sentence == f"Training waited for communication 50 % of its time{why}."


@pytest.mark.parametrize(
    ("cause", "options", "advice"),
    [
        (None, {}, "The causes are not known: the ranks had not compared"),
        ("imbalance", {}, "Look at the slowest rank in the table of ranks."),
        ("latency", {}, "Send fewer, larger messages"),
        ("redundancy", {}, "more than the ZeRO stage needs."),
        ("redundancy", {"volume": 1.5}, "needs. It sends 1.5 times the reference."),
        ("bandwidth", {"stage": "2"}, "accumulation steps, or gradient compression."),
        ("bandwidth", {"stage": "3"}, "steps, a lower ZeRO stage if memory allows, or gradient"),
        ("imbalance", {"stage": "none"}, "Look at the slowest rank in the table of ranks."),
        ("latency", {"stage": "none"}, "bucket_cap_mb"),
        ("bandwidth", {"stage": "none"}, "reshard_after_forward=False"),
    ],
)
def test_the_advice_on_waiting_depends_on_its_cause(
    tmp_path: Path, cause: str | None, options: dict[str, Any], advice: str
) -> None:
    finding = exposed_finding(tmp_path / "run", {cause: 1.0} if cause else {}, **options)

    assert advice in finding.advice


@pytest.mark.parametrize("cause", ["imbalance", "latency", "bandwidth"])
def test_advice_without_deepspeed_names_nothing_that_needs_it(tmp_path: Path, cause: str) -> None:
    words = re.compile(r"TrainingRun|\w+_bucket_size|overlap_comm|ZeRO|gradient_accumulation_steps")
    with_deepspeed = exposed_finding(tmp_path / "with", {cause: 1.0}, stage="3")
    without = exposed_finding(tmp_path / "without", {cause: 1.0}, stage="none")

    assert words.search(with_deepspeed.advice)
    assert not words.search(without.advice)


@pytest.mark.parametrize(
    ("report", "is_more_advised"),
    [
        (None, True),
        ("out of memory on cuda:0 in forward of step 10: 1.00 GiB requested", True),
        ("out of memory on cpu in data of step 10 (in DataLoader worker with pid 7): -", False),
        ("out of memory on an unknown device in data of step 10 (in DataLoader worker x)", False),
        ("rank 1 was probably killed by the kernel's OOM killer, after step 9", False),
    ],
)
def test_more_workers_are_not_advised_after_the_host_ran_out_of_memory(
    tmp_path: Path, report: str | None, is_more_advised: bool
) -> None:
    folder = write_run(
        tmp_path / "run", record=lambda rank, step: step_record(step, phase_seconds={"data": 0.4})
    )
    if report is not None:
        (folder / "oom").mkdir()
        (folder / "oom/rank-1-1.txt").write_text(f"{report}\n")

    [finding] = (each for each in summary_of(folder).findings if each.name == "data")

    assert ("more workers" in finding.advice) is is_more_advised


def memory_findings(folder: Path, device: str, headroom: float) -> list[Finding]:
    """The findings on a rank with this share of free memory, and another with more of it."""

    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, memory_bytes={device: {"allocated": 1e8, "limit": 1024.0**3}})

    write_run(folder, record=record)
    for number, ratio in enumerate((headroom + 0.2, headroom)):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set(memory.MEMORY_HEADROOM, ratio * 1024**3, device)
    return list(summary_of(folder).findings)


@pytest.mark.parametrize(
    ("device", "headroom", "severity", "sentence"),
    [
        (
            "cuda:0",
            0.0625,
            "warning",
            "Only 6.2 % of the memory of cuda:0 of rank 1 is free at the peak.",
        ),
        ("cpu", 0.0, "warning", "Only 0 % of the memory of cpu of rank 1 is free at the peak."),
        (
            "cuda:0",
            0.625,
            "info",
            "62 % of the memory of cuda:0 of rank 1 was never used.",
        ),
    ],
)
def test_too_little_and_too_much_free_memory_of_the_tightest_rank_are_findings(
    tmp_path: Path, device: str, headroom: float, severity: str, sentence: str
) -> None:
    [finding] = memory_findings(tmp_path / "run", device, headroom)

    assert (finding.severity, finding.sentence) == (severity, sentence)


@pytest.mark.parametrize(
    ("device", "headroom"), [("cuda:0", 0.09), ("cuda:0", 0.5), ("cpu", 0.625)]
)
def test_a_usual_share_of_free_memory_is_no_finding(
    tmp_path: Path, device: str, headroom: float
) -> None:
    assert memory_findings(tmp_path / "run", device, headroom) == []


def test_a_leak_has_its_growth_its_largest_category_and_the_number_of_ranks(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", ranks=3)
    for number, sizes in enumerate(((1, 2), (8, 4), (3, 5))):
        with RecordedRank(folder, number, world_size=3) as rank:
            for category, size in zip(("activations", "other"), sizes, strict=True):
                rank.recorder.set(memory.MEMORY_LEAK, size * 1024**2, "cpu", category)

    [finding] = summary_of(folder).findings

    assert finding.sentence == (
        "Memory of cpu of rank 1 grew by 12 MiB per step without larger batches (category "
        "activations), and on 2 more ranks."
    )


@pytest.mark.parametrize(
    ("phases", "sentences"),
    [
        ({"forward": 0.455, "checkpoint": 0.045}, []),
        (
            {"forward": 0.44, "checkpoint": 0.06},
            ["Checkpoints and rebuilds took 12 % of the wall time."],
        ),
        ({"forward": 0.25, "other": 0.25}, []),
        (
            {"forward": 0.2, "other": 0.3},
            [
                "Training spent 60 % of its time outside of the model, the optimizer and the data "
                "loader."
            ],
        ),
    ],
)
def test_time_for_checkpoints_or_outside_of_the_passes_is_a_finding_from_its_limit_on(
    tmp_path: Path, phases: dict[str, float], sentences: list[str]
) -> None:
    folder = write_run(
        tmp_path / "run", record=lambda rank, step: step_record(step, phase_seconds=phases)
    )

    assert [each.sentence for each in summary_of(folder).findings] == sentences


@pytest.mark.parametrize(
    ("steps", "slow", "sentences"),
    [
        (100, 0.75, []),
        (99, 1.25, []),
        (100, 1.25, ["The slowest hundredth of the steps took 2.5 times the median or more."]),
    ],
)
def test_steps_that_stall_are_a_finding_above_one_and_a_half_medians(
    tmp_path: Path, steps: int, slow: float, sentences: list[str]
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, seconds=slow if step > steps - 2 else 0.5)

    summary = summary_of(write_run(tmp_path / "run", steps=steps, record=record))

    assert [each.sentence for each in summary.findings] == sentences


@pytest.mark.parametrize(("steps", "expected"), [(19, None), (20, 0.5)])
def test_quantiles_need_twenty_steps(tmp_path: Path, steps: int, expected: float | None) -> None:
    summary = summary_of(write_run(tmp_path / "run", steps=steps))

    assert summary.figures["step_seconds_p50"] == expected


@pytest.mark.parametrize(("steps", "loss"), [(1, 1), (10, 10), (11, 10.5), (130, 125.5)])
def test_the_last_loss_is_the_mean_of_a_tenth_of_the_run_and_at_most_ten_steps(
    tmp_path: Path, steps: int, loss: float
) -> None:
    folder = write_run(
        tmp_path / "run", steps=steps, record=lambda rank, step: step_record(step, loss=step)
    )

    assert summary_of(folder).figures["loss"] == loss


def diverging_run(folder: Path, *, steps: int, bad: Mapping[int, Sequence[int]]) -> Path:
    """A run of 4 ranks whose loss is nan in some steps, by rank."""

    def record(rank: int, step: int) -> StepRecord:
        is_bad = step in bad.get(rank, ())
        loss = math.nan if is_bad else float(step)
        return step_record(step, loss=loss, nonfinite_loss=is_bad)

    return write_run(folder, ranks=4, steps=steps, record=record)


@pytest.mark.parametrize(
    ("bad", "loss"),
    [
        ({rank: range(60, 201) for rank in range(4)}, None),
        ({2: (195,)}, None),  # of one rank, and not the last step
        ({2: (190,)}, 195.5),
    ],
)
def test_the_loss_is_unknown_if_one_of_the_last_steps_was_not_finite(
    tmp_path: Path, bad: Mapping[int, Sequence[int]], loss: float | None
) -> None:
    summary = summary_of(diverging_run(tmp_path / "run", steps=200, bad=bad))

    assert summary.figures["loss"] == loss


def test_a_page_says_that_the_last_losses_were_not_finite(tmp_path: Path) -> None:
    folder = diverging_run(tmp_path / "run", steps=40, bad={0: (40,)})

    _, page = make_report(folder)

    assert "The loss of the last steps was nan or inf." in page
    assert "Steps with nan or inf: 1." in page


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        ({1: (1234,)}, "first in step 1,234 on rank 1"),
        ({3: (1500,), 1: (1501,)}, "first in step 1,500 on rank 3"),
        ({rank: range(700, 2001) for rank in range(4)}, "first in step 700 on ranks 0 to 3"),
    ],
)
def test_the_first_step_that_was_not_finite_is_named_with_its_ranks(
    tmp_path: Path, bad: Mapping[int, Sequence[int]], first: str
) -> None:
    folder = diverging_run(tmp_path / "run", steps=2000, bad=bad)

    [finding] = [each for each in summary_of(folder).findings if each.name == "nonfinite_losses"]
    assert f"step(s), {first}." in finding.sentence


def test_many_ranks_with_the_first_step_that_was_not_finite_are_counted(tmp_path: Path) -> None:
    """One rank per node records step 15, which is not finite on any rank."""
    folder = run_of_attempts(
        tmp_path / "run",
        (128, 20),
        record=lambda rank, step: step_record(step, loss=math.nan, nonfinite_loss=step >= 15),
    )

    [finding] = [each for each in summary_of(folder).findings if each.name == "nonfinite_losses"]

    assert finding.sentence.endswith(
        "first in step 15 on 16 of the ranks that recorded it, such as rank 0."
    )


@pytest.mark.parametrize(
    ("attempts", "bad", "sentence", "may_be_earlier"),
    [
        # Only each tenth step of rank 13 is recorded.
        (
            [(72, 100)],
            lambda rank, step: rank == 13 and step >= 52,
            "at least 5 recorded step(s), first in steps 51 to 60 on rank 13.",
            False,
        ),
        (
            [(72, 20)],
            lambda rank, step: rank == 13 and step < 20,
            "at least 1 recorded step(s), first in steps 1 to 10 on rank 13.",
            False,
        ),
        # Its gradients make the losses of all ranks nan.
        (
            [(72, 100)],
            lambda rank, step: step >= 53 or (rank == 13 and step == 52),
            "at least 48 recorded step(s), first in step 53 on 9 of the ranks that recorded it, "
            "such as rank 0.",
            True,
        ),
        (
            [(72, 9)],
            lambda rank, step: step >= 5,
            "at least 5 recorded step(s), first in step 5 on 9 of the ranks that recorded it, "
            "such as rank 0.",
            True,
        ),
        (
            [(72, 100)],
            lambda rank, step: step >= 60,
            "at least 41 recorded step(s), first in step 60 on 9 of the ranks that recorded it, "
            "such as rank 0.",
            True,
        ),
        (
            [(72, 100)],
            lambda rank, step: step >= 53 or (rank == 16 and step == 52),
            "at least 49 recorded step(s), first in step 52 on rank 16.",
            False,
        ),
        (
            [(72, 30)],
            lambda rank, step: rank in (13, 16) and step == 20,
            "at least 1 recorded step(s), first in steps 11 to 20 on ranks 13, 16.",
            False,
        ),
        # In an attempt of fewer ranks, each rank records each step.
        (
            [(8, 54), (72, 70)],
            lambda rank, step: rank == 5 and step >= 58,
            "at least 2 recorded step(s), first in steps 55 to 60 on rank 5.",
            False,
        ),
        (
            [(72, 54), (8, 70)],
            lambda rank, step: rank == 5 and step >= 38,
            "at least 18 recorded step(s), first in steps 31 to 40 on rank 5.",
            False,
        ),
    ],
)
def test_of_a_rank_that_records_each_tenth_step_the_first_that_was_not_finite_is_a_range(
    tmp_path: Path,
    attempts: Sequence[tuple[int, int]],
    bad: Callable[[int, int], bool],
    sentence: str,
    may_be_earlier: bool,
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, nonfinite_loss=bad(rank, step))

    summary = summary_of(run_of_attempts(tmp_path / "run", *attempts, record=record))

    [finding] = [each for each in summary.findings if each.name == "nonfinite_losses"]
    assert finding.sentence == f"The loss was nan or inf in {sentence}"
    assert ("earlier step on one of the 63 ranks" in finding.advice) is may_be_earlier


def test_ranks_that_a_job_has_lost_before_do_not_hide_that_the_others_diverge_together(
    tmp_path: Path,
) -> None:
    """Ranks 72, 80 and 88 record each step too, but only of the first attempt."""
    attempts = ((96, 20), (72, 70))

    summary = summary_of(
        run_of_attempts(
            tmp_path / "run",
            *attempts,
            record=lambda rank, step: step_record(step, nonfinite_loss=step >= 58),
        )
    )

    [finding] = [each for each in summary.findings if each.name == "nonfinite_losses"]
    assert "first in step 58 on 9 of the ranks" in finding.sentence
    assert "earlier step on one of the" in finding.advice


def test_ranks_that_join_a_job_later_do_not_hide_that_the_others_diverged_together(
    tmp_path: Path,
) -> None:
    """The training goes on with nan, and with ranks 72, 80 and 88."""
    summary = summary_of(
        run_of_attempts(
            tmp_path / "run",
            *((72, 60), (96, 70)),
            record=lambda rank, step: step_record(step, nonfinite_loss=step >= 58),
        )
    )

    [finding] = [each for each in summary.findings if each.name == "nonfinite_losses"]
    assert "first in step 58 on 9 of the ranks" in finding.sentence
    assert "earlier step on one of the" in finding.advice


def test_a_rank_with_a_slow_clock_has_not_left_before_the_loss_that_was_not_finite(
    tmp_path: Path,
) -> None:
    """Rank 8 is finite up to the end of the run, so not all ranks diverge together."""
    folder = run_of_attempts(
        tmp_path / "run",
        (72, 60),
        record=lambda rank, step: step_record(step, nonfinite_loss=step >= 58 and rank != 8),
    )
    run = read_run(folder)
    run.ranks[8].columns["ended_at"][:] -= 20.0

    summary = summarize(run, read_metrics(folder))

    [finding] = [each for each in summary.findings if each.name == "nonfinite_losses"]
    assert "earlier step on one of the" not in finding.advice


@pytest.mark.parametrize(("ranks", "num_thinned"), [(64, None), (72, 63)])
def test_a_note_says_on_how_many_ranks_a_loss_that_was_not_finite_may_be_unrecorded(
    tmp_path: Path, ranks: int, num_thinned: int | None
) -> None:
    summary = summary_of(
        run_of_attempts(
            tmp_path / "run",
            (ranks, 60),
            record=lambda rank, step: step_record(step, nonfinite_loss=(rank, step) == (13, 57)),
        )
    )

    notes = [note for note in summary.notes if "a loss of nan or inf" in note]
    assert [note.split(" ranks record")[0] for note in notes] == (
        [] if num_thinned is None else [f"{num_thinned} of {ranks}"]
    )
    assert summary.figures["nonfinite_losses"] == (1 if num_thinned is None else 0)


def test_the_first_step_of_folded_rows_that_was_not_finite_is_a_range(tmp_path: Path) -> None:
    folder = diverging_run(tmp_path / "run", steps=1000, bad={1: (501,)})

    run = read_run(folder, max_values=20_000)
    summary = summarize(run, read_metrics(folder))

    size = run.ranks[1].steps_per_row
    last = -(-501 // size) * size
    assert size > 1
    assert f"first in the {size} recorded steps up to step {last} on rank 1." in summary.verdict


@pytest.mark.parametrize(("max_values", "is_longer"), [(20_000, False), (1000, True)])
@pytest.mark.parametrize(("bad", "loss"), [(991, None), (990, 995.5)])
def test_the_loss_of_folded_rows_is_that_of_the_last_ten_steps(
    tmp_path: Path, max_values: int, is_longer: bool, bad: int, loss: float | None
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        is_bad = step == bad
        return step_record(step, loss=math.nan if is_bad else step, nonfinite_loss=is_bad)

    folder = write_run(tmp_path / "run", steps=1000, record=record)

    run = read_run(folder, max_values=max_values)
    figures = summarize(run, read_metrics(folder)).figures

    size = run.ranks[0].steps_per_row
    assert size > 1
    assert (size > 10) is is_longer
    assert figures["loss"] == loss


def test_of_ranks_that_record_each_tenth_step_the_last_loss_is_of_the_last_ten_steps_too(
    tmp_path: Path,
) -> None:
    folder = run_of_attempts(
        tmp_path / "run", (72, 200), record=lambda rank, step: step_record(step, loss=step)
    )

    loss = summary_of(folder).figures["loss"]

    assert loss == pytest.approx((9 * 195.5 + 63 * 200) / 72)  # 9 ranks record each step


@pytest.mark.parametrize(("kept", "step_seconds"), [(5, (10 * 0.5 + 5 * 2) / 15), (4, 0.5)])
def test_a_rank_with_half_of_the_steps_counts_and_one_with_less_does_not(
    tmp_path: Path, kept: int, step_seconds: float
) -> None:
    folder = write_run(
        tmp_path / "run",
        record=lambda rank, step: step_record(step, seconds=2.0 if rank else 0.5),
    )
    log = folder / "rank-1.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:kept]))

    assert summary_of(folder).figures["step_seconds"] == pytest.approx(step_seconds)


@pytest.mark.parametrize(
    ("reasons", "reports", "status", "sentence"),
    [
        (("completed", "interrupted"), (), "interrupted", None),
        (
            ("peer_failed", "interrupted"),
            (),
            "interrupted",
            None,
        ),
        (("peer_failed", "exception"), (), "exception", "The run ended by an exception."),
        (
            ("peer_failed", "completed"),
            ("memory/leak-rank-0-1.txt",),
            "peer_failed",
            "Rank 1 ended in good order while other ranks still trained, which failed in a "
            "collective.",
        ),
        (("peer_failed",), (), "peer_failed", "The run ended by an exception of another rank."),
        (("exception",), ("hang-rank-0-1.txt",), "exception", "A report without text."),
        ((), ("hang-rank-0-1.txt",), "hang", "A report without text."),
        ((), ("hang-rank-0-1.txt", "oom/rank-0-1.txt"), "out_of_memory", "A report without text."),
        ((), ("oom/rank-0-1.txt", "exits/rank-0-1.txt"), "killed", "A report without text."),
        ((), (), "unknown", None),
    ],
)
def test_the_end_of_a_run_is_the_gravest_reason_of_its_ranks_else_of_its_reports(
    tmp_path: Path,
    reasons: tuple[str, ...],
    reports: tuple[str, ...],
    status: str,
    sentence: object,
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    for number, reason in enumerate(reasons):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set_info(training.RUN_END_INFO, reason)
    for name in reports:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")

    summary = summary_of(folder)

    assert summary.status == status
    critical = (each.sentence for each in summary.findings if each.severity == "critical")
    assert next(critical, None) == sentence


def test_a_leak_of_a_run_that_failed_is_a_warning_and_names_its_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "exception")
    (folder / "memory").mkdir()
    (folder / "memory/leak-rank-1-7.txt").write_text("memory grows at line 7.\nmore")

    [exception, leak] = summary_of(folder).findings

    assert exception.name == "exception"
    assert leak == Finding(
        severity="warning",
        name="leak",
        sentence="Memory grows at line 7.",
        advice="Look at the allocation sites in the report. File: memory/leak-rank-1-7.txt.",
    )


def hang_report(folder: Path, at: float, end: str = "") -> None:
    """A report on a hang that rank 0 has found `at` seconds after the start."""
    text = f"rank 1 has not arrived\n\nrank 0 on here, {utc_text(STARTED + at)}\n{end}"
    (folder / "hang-rank-0-1.txt").write_text(text)


@pytest.mark.parametrize(
    ("is_active", "beginning"),
    [
        (True, "The run hangs: its last recorded step ended 40 s ago. Rank 1 has not arrived."),
        (False, "Interrupted after 10 steps, while it hung. Rank 1 has not arrived."),
    ],
)
def test_a_hang_that_has_not_ended_is_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_active: bool, beginning: str
) -> None:
    folder = write_run(
        tmp_path / "run", record=lambda rank, step: step_record(step, comm_exposed_seconds=0.4)
    )  # its last step ends 5 s after the start
    hang_report(folder, at=35)
    if not is_active:
        with RecordedRank(folder) as rank:
            rank.recorder.set_info(training.RUN_END_INFO, "interrupted")
    monkeypatch.setattr(run_summary, "is_locked", lambda folder: is_active)
    monkeypatch.setattr(run_summary, "unix_seconds", lambda: STARTED + 45)

    summary = summary_of(folder)

    assert summary.verdict.startswith(beginning)
    assert names_of(summary) == ["hang", "exposed_comm"]


@pytest.mark.parametrize(
    ("at", "restarted_at", "end"),
    [
        (4.0, None, ""),  # a step ended later
        (35.0, None, f"{'stack ' * MAX_REPORT_BYTES}\ntraining resumed, {utc_text(STARTED)}\n"),
        (35.0, 50.0, ""),
    ],
)
def test_a_hang_that_has_ended_is_only_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: float,
    restarted_at: float | None,
    end: str,
) -> None:
    folder = write_run(tmp_path / "run")
    hang_report(folder, at, end)
    if restarted_at is not None:
        with open(folder / "attempts.jsonl", "a") as file:
            file.write(json.dumps({"started_at_unix_seconds": STARTED + restarted_at}) + "\n")
    monkeypatch.setattr(run_summary, "is_locked", lambda folder: True)
    monkeypatch.setattr(run_summary, "unix_seconds", lambda: STARTED + 45)

    summary = summary_of(folder)

    assert summary.verdict.startswith("The run is active. ")
    assert {each.severity for each in summary.findings} == {"warning"}


def test_the_hosts_of_a_run_are_those_that_are_left(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (24, 20), (16, 40))

    assert summary_of(folder).facts.hosts == ("node-0", "node-1")


def test_the_figures_at_the_end_are_those_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    folder = elastic_run(tmp_path / "run", loss=50.0, oom_risk_ratio={"cpu": 0.9})
    for number, headroom in enumerate((1.3e9, 0.4e9, 0.1e9, 0.1e9)):
        with RecordedRank(folder, number, world_size=4) as rank:
            rank.recorder.set(memory.MEMORY_HEADROOM, headroom, "cpu")
            rank.recorder.set(communication.COMM_LINK_BANDWIDTH, headroom, "dp")
            rank.recorder.set(communication.COMM_LINK_BEST_BANDWIDTH, 1e9, "dp")

    summary = summary_of(folder)

    assert summary.facts.world_size == 2
    assert summary.figures["loss"] == pytest.approx(sum(5 / n for n in range(191, 201)) / 10)
    assert summary.figures["memory_headroom_ratio"] == pytest.approx(0.2)
    assert summary.figures["link_bandwidth_ratio"] == pytest.approx(0.4)
    assert not {"oom_risk", "memory_headroom"} & set(names_of(summary))


@pytest.mark.parametrize(
    ("name", "text", "is_overcome"),
    [
        ("hang-rank-0-1.txt", f"{{at}}\ntraining resumed, {utc_text(STARTED)}\n", True),
        ("hang-rank-0-1.txt", "{at}", True),
        ("oom/rank-1-1.txt", "{at}", True),
        ("oom/rank-1-killed.txt", f"started {utc_text(STARTED)}\nlast record: {{at}}", True),
        ("exits/rank-1-killed.txt", f"started {utc_text(STARTED)}\nlast record: {{end}}", False),
        ("exits/rank-1-killed.txt", "", False),
    ],
)
def test_what_the_run_has_overcome_does_not_decide_how_it_ended(
    tmp_path: Path, name: str, text: str, is_overcome: bool
) -> None:
    folder = write_run(tmp_path / "run", steps=200)  # its last step ends 100 s after the start
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    (folder / name).parent.mkdir(exist_ok=True)
    times = {"at": utc_text(STARTED + 60), "end": utc_text(STARTED + 90)}
    (folder / name).write_text(f"rank 1 was lost\n\n{text.format(**times)}\n")

    summary = summary_of(folder)

    [finding] = [each for each in summary.findings if each.sentence.startswith("Rank 1 was lost.")]
    assert (summary.status == "unknown") is is_overcome
    assert (finding.severity == "warning") is is_overcome
    assert finding.sentence.endswith("The run trained on.") is is_overcome


@pytest.mark.parametrize("max_values", [MAX_VALUES, 300])
@pytest.mark.parametrize("has_log", [True, False])
@pytest.mark.parametrize(("steps", "status"), [(39, "killed"), (59, "unknown")])
def test_a_rank_that_records_every_tenth_step_has_not_trained_on_with_the_steps_between(
    tmp_path: Path, steps: int, status: str, has_log: bool, max_values: int
) -> None:
    folder = write_run(
        tmp_path / "run",
        steps=steps,
        record=lambda rank, step: step_record(step, ended_at_unix_seconds=STARTED + 60 * step),
    )
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    log = folder / "rank-1.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[9::10]))
    if not has_log:
        log.unlink()
    (folder / "exits").mkdir()
    text = f"rank 1 was lost\n\nlast record: {utc_text(STARTED + 60 * 30)}\n"
    (folder / "exits/rank-1-killed.txt").write_text(text)

    run = read_run(folder, max_values=max_values)

    assert (run.ranks[0].steps_per_row > 1) is (max_values < MAX_VALUES)
    assert summarize(run, read_metrics(folder)).status == status


def test_an_exception_after_a_hang_that_was_overcome_is_the_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=200)
    hang_report(folder, at=10)
    with RecordedRank(folder) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "exception")

    assert summary_of(folder).verdict == "The run ended by an exception."


@pytest.mark.parametrize(("written", "num_notes"), [((), 0), ((0,), 1), ((0, 1), 0)])
def test_how_many_ranks_have_no_metrics_log_is_a_note_and_no_problem(
    tmp_path: Path, written: tuple[int, ...], num_notes: int
) -> None:
    folder = write_run(tmp_path / "run")
    for number in written:
        with RecordedRank(folder, number) as rank:
            record_metrics(rank.recorder)

    summary = summary_of(folder)

    assert len(summary.notes) == num_notes
    assert all(note.startswith("How far 1 of 2 ranks are behind") for note in summary.notes)
    assert not any("How far" in problem for problem in summary.problems)
    for form in FORMS:
        assert ("of 2 ranks are behind" in make_report(folder, form)[1]) is bool(num_notes)


def test_monitoring_is_a_share_of_the_time_after_the_last_step_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            record_metrics(rank.recorder)  # 5 s of steps, 0.05 s of monitoring
            rank.recorder.set(training.LAST_STEP_TIMESTAMP, STARTED + 5)
            rank.recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, STARTED + 10)  # 5 s of a hang

    assert summary_of(folder).figures["monitoring_ratio"] == pytest.approx(0.05 / 10)


def note(folder: Path, rank: int, author: str, text: str) -> None:
    (folder / "exits").mkdir(exist_ok=True)
    line = json.dumps({"text": text, "may_be_oom_kill": False})
    (folder / f"exits/rank-{rank}-{100 + rank}-7-{author}.note.json").write_text(line)


@pytest.mark.parametrize("victim", ["error", "launcher"])
def test_the_rank_whose_own_error_ended_the_run_is_the_verdict(tmp_path: Path, victim: str) -> None:
    folder = write_run(tmp_path / "run")
    with RecordedRank(folder, 1) as rank:
        rank.recorder.set_info(training.RUN_END_INFO, "exception")
    note(folder, 0, victim, f"ended {AFTER_FIRST}1 had exited with code 1")
    note(folder, 1, "error", f"{FAILED}ValueError: bad sample")
    for number in range(2):  # the victim's note is the last
        os.utime(
            folder / f"exits/rank-{number}-{100 + number}-7-{(victim, 'error')[number]}.note.json",
            (STARTED + 9, STARTED + 9 - number),
        )

    summary = summary_of(folder)

    assert summary.verdict.startswith("Rank 1 failed with ValueError: bad sample, after step 10.")
    assert summary.findings[0].advice.startswith("Look at the log of rank 1,")


def test_advice_on_a_rank_that_another_one_ended_points_to_that_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "exits").mkdir()
    text = f"rank 0 was ended by the launcher, {AFTER_FIRST}1 had exited with code 1"
    (folder / "exits/rank-0-killed.txt").write_text(text)

    [finding] = summary_of(folder).findings

    assert finding.advice.startswith("Look at the log of rank 1,")


@pytest.mark.parametrize(("lost", "num_problems"), [(25, 1), (23, 0)])
def test_steps_that_a_log_lost_at_its_beginning_are_missing(
    tmp_path: Path, lost: int, num_problems: int
) -> None:
    folder = write_run(
        tmp_path / "run", ranks=1, record=lambda rank, step: step_record(24 + step)
    )  # with fewer lost records it has resumed from a checkpoint
    with RecordedRank(folder) as rank:
        rank.recorder.add(overhead.DROPPED_RECORDS, lost, "run_log")

    problems = [each for each in summary_of(folder).problems if "are missing" in each]

    assert len(problems) == num_problems
    assert all(each.startswith("rank 0: steps 1 to 24 are missing: 25 ") for each in problems)


@pytest.mark.parametrize(
    ("interval", "seconds_before", "num_problems"), [(15, 46, 1), (15, 44, 0), ("damaged", 46, 0)]
)
def test_a_rank_that_trained_on_after_its_metrics_ended_is_named(
    tmp_path: Path, interval: object, seconds_before: float, num_problems: int
) -> None:
    folder = write_run(
        tmp_path / "run", steps=200, settings={"run_log": {"metrics_interval_seconds": interval}}
    )
    end = step_record(200).ended_at_unix_seconds
    for number, ended_at in enumerate((end, end - seconds_before)):
        with RecordedRank(folder, number) as rank:
            rank.recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, ended_at)

    problems = [each for each in summary_of(folder).problems if "the metrics end" in each]

    assert len(problems) == num_problems
    says = "rank 1: the metrics end 46 s before the last step, so 92 steps may lack collectives"
    assert all(each.startswith(says) for each in problems)


def test_a_rank_that_writes_no_metrics_since_the_job_has_grown_is_not_named(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (64, 40), (72, 400))
    (folder / "settings.json").write_text('{"run_log": {"metrics_interval_seconds": 15}}')
    for number, local_rank in ((9, 1), (16, 0)):
        with RecordedRank(folder, number, world_size=64, local_rank=local_rank) as rank:
            rank.recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, STARTED + 20)

    (problem,) = [each for each in summary_of(folder).problems if "the metrics end" in each]

    assert problem.startswith("rank 16: ")


def without_collectives(step: int, **changes: Any) -> StepRecord:
    """A step as it is appended from the ring of steps after a kill."""
    unknown: dict[str, Any] = {
        "collectives": {},
        "comm_seconds": None,
        "comm_exposed_seconds": None,
    }
    return step_record(step, **{**unknown, "memory_bytes": {}, "device_readings": {}, **changes})


@pytest.mark.parametrize(("num_missing", "num_problems"), [(0, 0), (10, 0), (11, 1), (60, 1)])
def test_a_rank_whose_last_steps_have_no_collectives_is_named(
    tmp_path: Path, num_missing: int, num_problems: int
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        is_missing = rank == 1 and step > 200 - num_missing
        return without_collectives(step) if is_missing else step_record(step)

    folder = write_run(tmp_path / "run", steps=200, record=record)
    summary = summary_of(folder)

    says = f"rank 1: the last {num_missing} recorded steps, {num_missing / 2:g} s, have neither"
    assert [each for each in summary.problems if each.startswith(says)] == list(
        summary.problems[:num_problems]
    )
    causes = ("process.separate", "Flight Recorder")
    assert all(cause in each for each in summary.problems[:num_problems] for cause in causes)
    num_left_out = num_missing if num_problems else 0
    assert summary.collectives[0].calls_per_step == pytest.approx(
        2 * (400 - num_missing) / (400 - num_left_out)
    )


def test_a_killed_rank_with_long_steps_may_lack_the_collectives_of_one(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        make = without_collectives if step == 20 else step_record
        return make(step, ended_at_unix_seconds=STARTED + 30.0 * step)

    problems = summary_of(write_run(tmp_path / "run", steps=20, record=record)).problems
    assert not [each for each in problems if "neither collectives" in each]


@pytest.mark.parametrize(
    "known",
    [{"collectives": step_record(1).collectives}, {"memory_bytes": {"cpu": {"limit": 2e9}}}],
)
def test_a_rank_whose_collectives_have_no_duration_or_are_unknown_is_monitored(
    tmp_path: Path, known: dict[str, Any]
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step) if step == 1 else without_collectives(step, **known)

    folder = write_run(tmp_path / "run", steps=50, record=record)

    assert not [each for each in summary_of(folder).problems if "neither collectives" in each]


def test_the_causes_of_waiting_are_those_of_the_steps_with_collectives(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return without_collectives(step) if step > 4 else step_record(step)

    folder = write_run(tmp_path / "run", ranks=1, steps=20, record=record)
    with RecordedRank(folder) as rank:
        rank.recorder.add(communication.COMM_EXPOSED_SECONDS, 0.2, "dp")
        rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.2, "bandwidth")
    [cause] = [each for each in summary_of(folder).causes if each.name == "bandwidth"]

    assert (cause.seconds_per_step, cause.ratio) == pytest.approx((0.05, 0.1))


def test_if_most_of_the_wait_was_not_measured_the_advice_is_to_look_why(tmp_path: Path) -> None:
    finding = exposed_finding(tmp_path / "run", {"bandwidth": 0.5})

    assert finding.advice.startswith("Look at the problems of this report first")


def test_without_a_metrics_log_the_advice_on_waiting_is_to_write_one(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", record=lambda rank, step: step_record(step, comm_exposed_seconds=0.4)
    )

    [finding] = summary_of(folder).findings

    assert finding.advice.startswith("The causes were not recorded; run with run_log.metrics")


def test_restarts_are_counted_from_the_attempts_of_the_steps_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    log = folder / "rank-1.jsonl"
    log.write_text(log.read_text().replace('"attempt":0', '"attempt":3'))

    summary = summary_of(folder)

    assert summary.figures["attempts"] == 4
    assert summary.findings[0].sentence == "The run was restarted 3 time(s)."


@pytest.mark.parametrize(
    ("age", "beginning"),
    [
        (299.0, "The run is active. Nothing holds"),
        (300.0, "The run is active, but its last recorded step ended 5 min 0 s ago. Nothing"),
    ],
)
def test_the_verdict_on_an_active_run_says_when_it_fell_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, beginning: str
) -> None:
    folder = write_run(tmp_path / "run")  # its last step ends 5 s after the start
    monkeypatch.setattr(run_summary, "is_locked", lambda folder: True)
    monkeypatch.setattr(run_summary, "unix_seconds", lambda: STARTED + 5 + age)

    summary = summary_of(folder)

    assert summary.status == "running"
    assert summary.verdict.startswith(beginning)


@pytest.mark.parametrize(
    ("phases", "exposed", "verdict"),
    [
        (
            {"forward": 0.1, "backward": 0.2, "optimizer": 0.05, "other": 0.15},
            0.05,
            "Nothing holds this run back: forward, backward and optimizer take 70 % of its time, "
            "communication was waited for 10 %.",
        ),
        (
            {"forward": 0.1, "backward": 0.1, "optimizer": 0.05, "other": 0.25},
            None,
            "Nothing holds this run back: forward, backward and optimizer take 50 % of its time.",
        ),
        (
            {"forward": 0.05, "generate": 0.1, "optimizer": 0.05, "other": 0.3},
            None,
            "The phase other takes 60 % of the time: neither data loading nor a pass. Forward, "
            "backward and optimizer take 20 %, generation 20 %.",
        ),
    ],
)
def test_without_a_problem_the_verdict_has_the_share_of_the_passes(
    tmp_path: Path, phases: dict[str, float], exposed: float | None, verdict: str
) -> None:
    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, phase_seconds=phases, comm_exposed_seconds=exposed)

    assert summary_of(write_run(tmp_path / "run", record=record)).verdict == verdict


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "-"),
        (0.0, "0 %"),
        (0.0004, "< 0.1 %"),
        (0.0006, "0.1 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (-0.05, "-5.0 %"),
        (1.234, "123 %"),
    ],
)
def test_a_percentage_has_a_decimal_below_ten_percent(ratio: float | None, text: str) -> None:
    assert percent(ratio) == text


def test_a_decision_has_all_its_values(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    line = {
        "number": 2**53 - 1,
        "step": 105,
        "changes": [
            {"knob": "stage", "before": 2, "after": None},
            {"knob": "python_gc", "before": True, "after": False},
        ],
        "verdict": "rejected",
        "symptom": {"name": "data"},
        "reason": "slower",
        "numerics": "bitwise",
        "gain": 0.11,
        "lower": 0.08,
        "upper": 0.14,
        "predicted_gain": 0.2,
        "pairs": 6,
        "steps": 48,
        "exploration_seconds": 2.5,
    }
    too_large = {**line, "number": 2**53}
    (folder / "decisions.jsonl").write_text(f"{json.dumps(too_large)}\n{json.dumps(line)}\n")

    assert summary_of(folder).tuner.decisions == (
        TunerDecision(
            number=2**53 - 1,
            step=105,
            change="stage 2 -> none, python_gc true -> false",
            verdict="rejected",
            symptom="data",
            reason="slower",
            numerics="bitwise",
            gain=0.11,
            lower=0.08,
            upper=0.14,
            predicted_gain=0.2,
            pairs=6,
            steps=48,
            exploration_seconds=2.5,
        ),
    )


def test_advice_has_no_measured_gain_and_no_trial(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    symptom = {"name": "data"}
    texts = {"verdict": "advised", "symptom": symptom, "reason": "", "numerics": ""}
    (folder / "decisions.jsonl").write_text(
        json.dumps({"number": 1, "step": 5, "changes": [], **texts})
    )

    [found] = summary_of(folder).tuner.decisions

    assert (found.gain, found.lower, found.upper, found.predicted_gain) == (None,) * 4
    assert (found.pairs, found.steps, found.exploration_seconds) == (0, 0, 0.0)


def test_the_tuner_has_its_current_state_and_the_symptoms_above_zero(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", settings={"tuner": {"mode": "advise"}})
    with RecordedRank(folder) as rank:
        rank.recorder.set(tuner.TUNER_STATE, 0, "observe")
        rank.recorder.set(tuner.TUNER_STATE, 1, "trial")
        rank.recorder.set(tuner.TUNER_SYMPTOM, 0.0, "data_bound")
        rank.recorder.set(tuner.TUNER_SYMPTOM, 0.3, "host_bound")
        rank.recorder.add(tuner.TUNER_DISCARDED_OBSERVATIONS, 2)

    found = summary_of(folder).tuner

    assert (found.mode, found.state, found.symptoms) == ("advise", "trial", {"host_bound": 0.3})
    assert found.discarded_observations == 2


@pytest.mark.parametrize(("size", "samples"), [(1, 32.0), (2, None)])
def test_ranks_share_samples_if_the_ds_config_slices_the_model(
    tmp_path: Path, size: int, samples: float | None
) -> None:
    config = {"tensor_parallel": {"autotp_size": size}}

    summary = summary_of(write_run(tmp_path / "run", ds_config=config))

    assert summary.figures["samples_per_second"] == samples
