"""Tests of the figures, findings and verdict of a recorded run."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_metrics import RecordedRank
from recorded_runs import STARTED, step_record, write_run

from zerowatch.metrics.catalog import (
    across_ranks,
    communication,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.common.exit_notes import AFTER_FIRST, FIRST_TO_EXIT
from zerowatch.runtime.reports.end_tables import print_end_tables
from zerowatch.runtime.reports.metrics_reader import read_metrics
from zerowatch.runtime.reports.run_reader import read_run
from zerowatch.runtime.reports.run_summary import FIGURES, RunSummary, summarize, summary_of
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

    assert summary.findings[0].name == "same_losses"
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


def test_causes_add_up_to_the_exposed_time_of_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            record_metrics(rank.recorder)
            rank.tick()

    summary = summary_of(folder)

    assert {share.name: pytest.approx(share.seconds) for share in summary.causes} == {
        "imbalance": 0.7,
        "bandwidth": 0.2,
        "latency": 0.0,
        "redundancy": 0.0,
        "unknown": 0.1,
    }
    assert summary.causes[0].ratio == pytest.approx(0.14)
    assert summary.figures["imbalance_ratio"] == pytest.approx(0.14)
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
    texts = (f"{FIRST_TO_EXIT}, by SIGKILL", f"was ended, {AFTER_FIRST}0 had exited by SIGKILL")
    for rank, text in enumerate(texts):
        note = json.dumps({"text": text, "may_be_oom_kill": rank == 0})
        (folder / f"exits/rank-{rank}-{100 + rank}-7-launcher.note.json").write_text(note)

    summary = summary_of(folder)

    assert summary.status == "killed"
    assert summary.figures["exit_reports"] == 2
    assert summary.verdict.startswith("Rank 0 was the first") and "after step 40" in summary.verdict
    assert "note.json" not in summary.findings[0].advice


def test_ranks_that_have_not_closed_are_named_if_the_end_is_unknown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "targets.json").write_text('[{"targets": ["10.0.0.1:9464"]}]')
    for rank in (0, 1):
        (folder / f"rank-{rank}.alive.json").write_text("{}")

    verdict = summary_of(folder).verdict

    assert verdict.startswith(
        "The folder does not show how the run ended: ranks 0 to 1 were killed"
    )


def test_a_note_that_a_start_has_reported_is_no_second_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "exits").mkdir()
    (folder / "exits/rank-0-100-7-launcher.note.json").write_text('{"text": "exited"}')
    (folder / "exits/rank-0-100-7.life.json").write_text("{}")
    (folder / "exits/rank-0-killed.txt").write_text("rank 0 exited\n")

    assert summary_of(folder).figures["exit_reports"] == 1


def test_profiled_steps_are_named_as_the_cost_of_monitoring(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"run-{every}", settings={"profile": {"every_steps": every}})
        for every in (0, 10)
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
