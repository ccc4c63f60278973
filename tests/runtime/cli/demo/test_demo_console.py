"""Tests of the demo's console output: summary of steps, lines and advice."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
from fakes.steps import collective, step

from zerowatch.metrics.catalog.communication import COMM_CAUSE_SECONDS
from zerowatch.metrics.catalog.tuner import TUNER_DECISIONS, TUNER_STATE, TUNER_SYMPTOM
from zerowatch.metrics.recorder import Snapshot
from zerowatch.metrics.thresholds import DEVICE_UTILIZATION_LOW, EXPOSED_COMM_RATIO_HIGH
from zerowatch.runtime.cli.demo.console import DemoConsole
from zerowatch.runtime.cli.demo.summary import advise, summarize


class Terminal(io.StringIO):
    def isatty(self):
        return True


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.fixture
def watch(tmp_path):
    """A fake watch with the three members that the console reads."""
    targets = [{"targets": [f"127.0.0.1:946{rank}"], "labels": {}} for rank in (4, 5)]
    (tmp_path / "targets.json").write_text(json.dumps(targets))
    return fake_watch(run_folder=tmp_path)


def fake_watch(run_folder, symptoms=None, state="observe", **verdicts):
    causes = {("imbalance",): 0.4, ("bandwidth",): 0.2}
    decisions = {(verdict,): float(number) for verdict, number in verdicts.items()}
    ratios = {(symptom,): ratio for symptom, ratio in (symptoms or {}).items()}
    values = {
        COMM_CAUSE_SECONDS: causes,
        TUNER_DECISIONS: decisions,
        TUNER_SYMPTOM: ratios,
        TUNER_STATE: {("warmup",): 0.0, (state,): 1.0},
    }
    snapshot = Snapshot(values=values, distributions={})
    return SimpleNamespace(
        address="127.0.0.1:9464",
        live_page_url="http://127.0.0.1:9464/",
        run_folder=run_folder,
        snapshot=lambda: snapshot,
    )


def console_output(watch, file, *records, steps=None):
    """Return everything that a console writes for a run of these steps."""
    console = DemoConsole(watch=watch, steps=steps or len(records), num_ranks=2, file=file)
    for record in records:
        console.on_step(record)
    console.show_summary(stage=2)
    return file.getvalue()


def test_a_summary_is_the_sum_of_its_steps():
    records = [
        step(1, seconds=1.0, loss=5.5, all_reduce=collective(calls=2, seconds=0.1), comm=0.1),
        step(2, seconds=3.0, loss=4.5, all_reduce=collective(calls=3, seconds=0.2), comm=0.2),
        step(3, seconds=1.0, loss=3.5, all_gather=collective(calls=1, seconds=None), peak=7e6),
    ]

    summary = summarize(records, num_ranks=2)

    assert summary.training_seconds == pytest.approx(5.0)
    assert sum(summary.phase_seconds.values()) == pytest.approx(5.0)
    assert summary.comm_ratio == pytest.approx(0.3 / 5.0)
    reduced = summary.collectives["all_reduce"]
    assert (reduced.calls, reduced.payload_bytes, reduced.wire_bytes) == (5, 5000, 2500.0)
    assert reduced.seconds == pytest.approx(0.3)
    assert summary.collectives["all_gather"].seconds is None
    assert summary.samples_per_second == pytest.approx(3 * 8 * 2 / 5.0)
    assert (summary.first_loss, summary.last_loss) == (5.5, 4.0)  # the mean of the last two
    assert summary.peak_bytes == 7e6


def test_communication_with_an_upper_bound_is_shown_as_one(watch):
    exact = step(1, seconds=1.0, comm=0.1)
    bounded = dataclasses.replace(exact, comm_seconds_is_upper_bound=True)

    outputs = [
        console_output(watch, io.StringIO(), *records) for records in ([exact], [exact, bounded])
    ]

    assert ["(at most)" in output for output in outputs] == [False, True]


def test_evaluation_and_checkpoints_are_excluded_from_a_summary():
    records = [step(1, seconds=2.0, phases={"forward": 1.0, "eval": 0.7, "checkpoint": 0.3})]

    summary = summarize(records, num_ranks=1)

    assert summary.training_seconds == pytest.approx(1.0)
    assert summary.phase_seconds == {"forward": 1.0}


def test_figures_that_were_never_measured_are_none():
    records = [step(1, seconds=1.0, loss=None, samples=None, peak=None, comm=None, busy=None)]

    summary = summarize(records, num_ranks=2)

    assert summary.samples_per_second is None
    assert (summary.first_loss, summary.last_loss, summary.peak_bytes) == (None, None, None)
    assert (summary.comm_ratio, summary.utilization_ratio) == (None, None)


def test_utilization_is_summed_over_ranks_on_cpu_only():
    on_cpu = [step(1, seconds=1.0, busy=0.4, device="cpu")]
    on_gpu = [step(1, seconds=1.0, busy=0.4, device="cuda:1")]

    ratios = [summarize(run, num_ranks=2).utilization_ratio for run in (on_cpu, on_gpu)]

    assert ratios == [0.8, 0.4]


def test_a_summary_has_the_memory_of_the_gpu_if_the_host_s_is_recorded_too():
    on_gpu = step(1, peak=3e9, busy=0.9, device="cuda:0")
    both = {**on_gpu.memory_bytes, **step(1, peak=5e9).memory_bytes}
    record = dataclasses.replace(on_gpu, memory_bytes=both)

    summary = summarize([record], num_ranks=1)

    assert (summary.device, summary.peak_bytes) == ("cuda:0", 3e9)


def test_each_line_has_the_means_of_its_own_steps(watch):
    output = console_output(watch, io.StringIO(), step(1, seconds=1.0), step(2, seconds=3.0))

    lines = [line.split() for line in output.splitlines() if line.lstrip().startswith(("1/", "2/"))]
    assert [words[3] for words in lines] == ["1.000", "3.000"]  # s/step


@pytest.mark.parametrize(
    ("stage", "change"),
    [(0, "Larger micro-batches"), (2, "zerowatch demo --stage 0"), (3, "demo --stage 2")],
)
def test_advice_for_much_exposed_communication_names_a_change(stage, change):
    limit = EXPOSED_COMM_RATIO_HIGH
    too_much = [step(1, comm=0.9, exposed=limit + 0.01, busy=1.0, device="cuda:0")]
    enough = [step(1, comm=0.9, exposed=limit, busy=1.0, device="cuda:0")]

    first_lines = [advise(summarize(r, num_ranks=2), stage=stage)[0] for r in (too_much, enough)]

    assert first_lines[0].startswith("Training waits for communication 21% of its time, over 20%.")
    assert change in first_lines[0]
    assert first_lines[1].startswith("All figures are within usual limits.")


def test_advice_for_a_low_device_utilization_has_its_likely_cause():
    idle = DEVICE_UTILIZATION_LOW - 0.1
    waiting = step(1, phases={"data": 0.5, "forward": 0.5}, busy=idle, device="cuda:0")
    small = step(1, phases={"data": 0.01, "forward": 0.99}, busy=idle, device="cuda:0")

    lines = [advise(summarize([run], num_ranks=1), stage=2) for run in (waiting, small)]

    assert "cuda:0 is 60% busy, under 70%" in lines[0][0]
    assert "DataLoader" in lines[0][0]
    assert "Larger micro-batches" in lines[1][0]
    assert lines[0][-1].startswith("Monitor your own job: ")
    assert lines[0][-1].endswith("zerowatch run your_script.py")


def test_each_column_of_a_line_has_its_figure(watch):
    record = step(
        1,
        seconds=0.5,
        phases={"data": 0.05, "forward": 0.1, "backward": 0.2, "optimizer": 0.1, "other": 0.05},
        loss=5.5451,
        comm=0.3,
        exposed=0.06,
        peak=600 * 2**20,
        busy=0.45,
    )

    lines = console_output(watch, io.StringIO(), record).splitlines()

    names = next(number for number, line in enumerate(lines) if line.startswith("step"))
    figures = lines[names + 1].replace(" MiB", "MiB").split()
    assert dict(zip(lines[names].split(), figures, strict=True)) == {
        "step": "1/1",
        "loss": "5.545",
        "samples/s": "32.0",
        "s/step": "0.500",
        "data": "10%",
        "fwd": "20%",
        "bwd": "40%",
        "opt": "20%",
        "other": "10%",
        "exposed": "12%",
        "memory": "600MiB",
        "busy": "90%",
    }
    assert len(lines[names]) == len(lines[names + 1]) <= 80


def test_a_file_gets_few_plain_lines(watch):
    run = [step(number) for number in range(1, 101)]

    text = console_output(watch, io.StringIO(), *run)

    kept = [line for line in text.splitlines() if "/100" in line]
    assert [line.split("/")[0].strip() for line in kept] == ["1", *map(str, range(4, 101, 4))]
    assert "\r" not in text
    assert "\x1b" not in text


def test_a_file_with_forced_color_gets_no_redrawn_lines(watch, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")

    text = console_output(watch, io.StringIO(), *[step(number) for number in range(1, 101)])

    assert "\r" not in text


def test_a_terminal_shows_the_current_step_in_color(watch, monkeypatch):
    monkeypatch.setattr("zerowatch.runtime.cli.demo.console.REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    text = console_output(watch, Terminal(), step(1), step(2), step(3), steps=100)

    redrawn = [line for line in text.split("\r") if "2/100" in line]
    assert len(redrawn) == 1
    assert "\x1b[1;32m" in text


def test_exposed_communication_above_its_limit_is_highlighted_and_overlapped_is_not(
    watch, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    hidden, exposed = (
        step(1, comm=0.9, exposed=seconds, busy=1.0, device="cuda:0") for seconds in (0.1, 0.9)
    )

    texts = [console_output(watch, Terminal(), each) for each in (hidden, exposed)]

    assert ["\x1b[33m" in text for text in texts] == [False, True]


def test_no_color_is_honored_on_a_terminal(watch, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")

    text = console_output(watch, Terminal(), step(1, comm=0.9))

    assert "\x1b[32" not in text
    assert "\x1b[33" not in text


def test_the_addresses_of_all_ranks_and_the_run_log_are_printed(watch):
    text = console_output(watch, io.StringIO(), step(1))

    assert text.count("live page http://127.0.0.1:9464/\n") == 1
    assert "curl 127.0.0.1:9464/metrics\n" in text
    assert "curl 127.0.0.1:9465/metrics\n" in text
    assert f"{watch.run_folder}/rank-0.jsonl" in "".join(text.split())  # a long path is wrapped


def run_with_a_late_rank(watch, *, late_at, num_steps):
    """Return the lines of a run whose second rank publishes its address after step `late_at`."""
    targets = watch.run_folder / "targets.json"
    everyone = targets.read_text()
    targets.write_text(json.dumps(json.loads(everyone)[:1]))
    file = io.StringIO()
    console = DemoConsole(watch=watch, steps=num_steps, num_ranks=2, file=file)
    for number in range(1, num_steps + 1):
        console.on_step(step(number))
        if number == late_at:
            targets.write_text(everyone)
    return [line.split()[:2] for line in file.getvalue().splitlines() if line]


def test_lines_are_held_until_all_addresses_are_known(watch):
    lines = run_with_a_late_rank(watch, late_at=2, num_steps=4)

    assert [second for first, second in lines if first == "curl"] == [
        "127.0.0.1:9464/metrics",
        "127.0.0.1:9465/metrics",
    ]
    assert [first for first, _ in lines] == [
        *("live", "curl", "curl", "run", "step"),
        *("1/4", "2/4", "3/4", "4/4"),
    ]


def test_the_address_of_a_very_late_rank_comes_between_the_lines(watch):
    lines = run_with_a_late_rank(watch, late_at=11, num_steps=12)

    firsts = [first for first, _ in lines]
    assert firsts[:5] == ["live", "curl", "run", "step", "1/12"]
    assert firsts[-3:] == ["11/12", "curl", "12/12"]


def test_without_a_run_log_only_the_address_of_this_rank_is_printed():
    watch = fake_watch(run_folder=None)

    text = console_output(watch, io.StringIO(), step(1))

    assert "curl 127.0.0.1:9464/metrics\n" in text
    assert "none written" in text


def test_a_closed_pipe_does_not_disturb_training(watch):
    console_output(watch, ClosedPipe(), step(1), step(2))


def test_a_run_without_a_step_prints_a_hint(watch):
    assert "No step was recorded" in console_output(watch, io.StringIO(), steps=5)


def test_the_tables_have_phases_and_collectives_with_their_totals(watch):
    run = [step(n, comm=0.3, all_reduce=collective(calls=2, seconds=0.3)) for n in (1, 2)]

    lines = [line.split() for line in console_output(watch, io.StringIO(), *run).splitlines()]

    assert ["forward", "1.0", "50%"] in lines
    assert ["all", "2.0", "100%"] in lines
    assert ["of", "which", "not", "overlapped", "0.6", "30%"] in lines
    cause = "another rank was late, or no transfer"
    assert ["imbalance:", *cause.split(), "0.4", "20%"] in lines
    assert ["all_reduce", "4", "3.91", "KiB", "1.95", "KiB", "0.6"] in lines


def test_the_tables_count_the_changes_that_the_tuner_kept(tmp_path):
    tuned = fake_watch(tmp_path, accepted=2, rolled_back=1, rejected=2)

    assert "2 of 5 changes accepted" in console_output(tuned, io.StringIO(), step(1))


@pytest.mark.parametrize(
    ("symptoms", "why"),
    [
        ({}, "the run was too short for a diagnosis"),
        ({"comm_latency": 0.0}, "no bottleneck was found"),
        (
            {"data_bound": 0.0, "comm_latency": 0.25},
            "comm_latency at 25%; the run was too short to test a change",
        ),
        (
            {"memory_pressure": 0.7, "comm_latency": 0.25},
            "memory_pressure at 70%; nothing is tried while memory is short",
        ),
    ],
)
def test_the_tables_give_the_reason_why_the_tuner_changed_nothing(tmp_path, symptoms, why):
    tuned = fake_watch(tmp_path, symptoms=symptoms)

    assert f"no change: {why}" in console_output(tuned, io.StringIO(), step(1))


def test_an_unfinished_trial_is_reported_as_such(tmp_path):
    tuned = fake_watch(tmp_path, symptoms={"comm_latency": 0.25}, state="trial")

    assert "the run ended during a trial" in console_output(tuned, io.StringIO(), step(1))


def test_all_tables_of_a_run_have_their_figures(watch, monkeypatch):
    monkeypatch.chdir(watch.run_folder)
    monkeypatch.setattr("zerowatch.runtime.cli.demo.summary._program", lambda: "zerowatch")
    (watch.run_folder / "report.html").touch()
    phases = {"data": 0.1, "forward": 0.5, "backward": 1.1, "optimizer": 0.3}
    gather = collective(calls=1, seconds=None)
    run = [
        step(1, seconds=2.0, phases=phases, loss=5.5, comm=0.6, exposed=0.5, peak=6e8, busy=0.3),
        step(2, seconds=2.0, phases=phases, loss=3.25, comm=0.4, exposed=0.5, peak=5e8, busy=0.2),
    ]
    run = [
        dataclasses.replace(
            each,
            collectives={
                "all_gather": gather,
                "all_reduce": collective(calls=each.step + 1, seconds=0.2),
            },
        )
        for each in run
    ]

    text = console_output(watch, io.StringIO(), *run)

    tables = text[text.index("Time of 2 steps") :]
    assert [" ".join(line.split()) for line in tables.splitlines() if line.strip(" ─━╴╶╺╸")] == [
        "Time of 2 steps by phase (rank 0 of 2)",
        "phase seconds share",
        "backward 2.2 55%",
        "forward 1.0 25%",
        "optimizer 0.6 15%",
        "data 0.2 5%",
        "all 4.0 100%",
        "of which communication 1.0 25%",
        "of which not overlapped 1.0 25%",
        "imbalance: another rank was late, or no transfer 0.4 10%",
        "latency: fixed cost of each call 0.0 0%",
        "redundancy: more was sent than needed 0.0 0%",
        "bandwidth: the link was busy 0.2 5%",
        "Collectives",
        "operation calls payload sent seconds",
        "all_reduce 5 4.88 KiB 2.44 KiB 0.4",
        "all_gather 2 1.95 KiB 0.977 KiB -",
        "loss 5.500 -> 3.250 nats per byte (mean of the last steps)",
        "speed 8.0 samples/s on all ranks",
        "peak memory 572 MiB on cpu",
        "device 50% busy, all ranks",
        "tuner no change: the run was too short for a diagnosis",
        "run log rank-0.jsonl",
        "report report.html",
        "made by: zerowatch report .",
        "What to try next",
        "Training waits for communication 25% of its time, over 20%. Less sharding sends less, if "
        "memory allows: zerowatch demo --stage 0",
        "cpu is 50% busy, under 70%. Other programs may be using it.",
        "Monitor your own job: zerowatch run your_script.py",
    ]
