"""A run's decisions are made again offline, and what today's code would do otherwise is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from fakes.tuner_decisions import SLOW_LINK, conclusion

from zerowatch.__main__ import commands
from zerowatch.runtime.tuner.policy.decision import decide
from zerowatch.runtime.tuner.policy.journal import DECISIONS_FILE, Journal
from zerowatch.runtime.tuner.policy.recorded import from_json, to_json_line
from zerowatch.runtime.tuner.policy.replay import Replayed, judged, replay


def decided(found, number=1):
    return decide(found, number=number, unix_seconds=1.8e9, step=41, world_size=2, mode="auto")


def record_of(found, **others):
    return from_json(to_json_line(replace(decided(found), **others), found))


@pytest.mark.parametrize("seconds_after", [0.03, 0.069, 0.07, 0.2, None])
def test_the_code_that_decided_decides_the_same_again(seconds_after):
    assert replay(record_of(conclusion(seconds_after))) == Replayed()


def test_a_verdict_that_the_figures_do_not_bear_is_told():
    found = replay(record_of(conclusion(0.2), verdict="accepted"))

    assert found.diagnosis is found.proposal is None
    assert found.verdict.startswith("it would be rolled_back: ")
    assert found.verdict.endswith("slower)")


def test_a_trial_that_is_not_at_its_end_is_told():
    record = record_of(conclusion(0.069))

    found = replay(replace(record, times=record.times[:7]))

    assert found.verdict == "it would not be sure yet"


def test_a_trial_that_the_run_broke_off_is_not_judged():
    found = replay(record_of(conclusion(0.03), gain=None, verdict="rolled_back"))

    assert found == Replayed()


def test_other_symptoms_are_told():
    record = record_of(conclusion())
    quiet = replace(SLOW_LINK, exposed_ratio=0.05, cause_ratios={})

    found = replay(replace(record, situation=replace(record.situation, reading=quiet)))

    assert found.diagnosis.startswith("it would see ")
    assert "comm_bandwidth" in found.diagnosis.partition(" instead of ")[2]
    assert found.proposal == "it would propose nothing"


def test_another_proposal_is_told():
    record = record_of(conclusion())
    denied = frozenset({("micro_batch_samples", 16)})

    found = replay(replace(record, situation=replace(record.situation, denied=denied)))

    assert found.proposal == "it would propose micro_batch_samples 4 -> 8"


def test_windows_that_said_nothing_are_no_evidence():
    found = conclusion()

    assert judged(found.plan, (None,) * 100) is None


@pytest.fixture
def run_folder(tmp_path):
    journal = Journal(lambda: tmp_path / "night-7")
    for number, seconds_after in enumerate([0.03, 0.2], 1):
        found = conclusion(seconds_after)
        journal.write(decided(found, number), found)
    return tmp_path / "night-7"


def tune(*arguments):
    return CliRunner().invoke(commands, ["tune", *map(str, arguments)])


def test_the_command_says_line_by_line_what_it_would_decide(run_folder):
    done = tune("--replay", run_folder)

    lines = done.output.splitlines()
    assert done.exit_code == 0
    assert lines[0].startswith("1. step 41: ")
    assert lines[0].endswith(": kept")
    assert "taken back" in lines[2]
    assert lines[1] == lines[3] == "   today: the same"
    assert lines[4] == "2 decisions, all as today's code would make them"


def test_a_decision_that_would_be_another_one_fails_the_command(run_folder):
    file = run_folder / DECISIONS_FILE
    file.write_text(file.read_text().replace('"verdict":"rolled_back"', '"verdict":"accepted"'))

    done = tune("--replay", run_folder)

    assert done.exit_code == 1
    assert "   today: it would be rolled_back: " in done.output
    assert done.output.endswith("2 decisions, 1 of them others today\n")


def test_a_missing_file_is_one_clear_line(tmp_path):
    done = command("tune", "--replay", tmp_path / "nowhere")

    assert done.returncode == 2
    assert done.stderr == (
        f"zerowatch: {tmp_path / 'nowhere' / DECISIONS_FILE} cannot be read: No such file or "
        "directory; give the folder of a run whose tuner decided something\n"
    )


def test_a_damaged_line_is_named(run_folder):
    with (run_folder / DECISIONS_FILE).open("a") as file:
        file.write('{"schema": 1, "num')

    done = command("tune", "--replay", run_folder)

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"zerowatch: line 3 of {run_folder / DECISIONS_FILE} is damaged or of ")


def test_no_torch_is_needed(run_folder):
    done = command("tune", "--replay", run_folder, torch=False)

    assert done.returncode == 0, done.stderr


def command(*arguments, torch=True):
    """Run the program; without torch, importing that or deepspeed fails."""
    block = "" if torch else "sys.modules['torch'] = sys.modules['deepspeed'] = None; "
    code = f"import sys; {block}from zerowatch.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )


def test_a_run_that_decided_nothing_is_no_error(tmp_path):
    (tmp_path / "settings.json").write_text("{}")

    done = CliRunner().invoke(commands, ["tune", "--replay", str(tmp_path)])

    assert done.exit_code == 0
    assert "has no decisions: its tuner found nothing to change, or was off" in done.output
