"""Tests of `Advisor`: a run with its own training loop gets advice, and is not changed."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from fakes.clock import FakeClock
from fakes.tuner_decisions import CONFIGURATION, OPTIONS, SLOW_LINK, tuner_input
from replay_decisions import ReplayDifference, parse_line, replay
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

from zerowatch.metrics.catalog import tuner
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.monitor import advisor as advisor_module
from zerowatch.runtime.monitor.advisor import MIN_SECONDS, MIN_STEPS, Advisor
from zerowatch.runtime.tuner.knobs import read_only_knobs
from zerowatch.runtime.tuner.policy import step_time_observer as observer_module
from zerowatch.runtime.tuner.policy.controller_interface import WARMUP_STEPS
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import State


class Run:
    """A monitored run on rank 0 with given metrics."""

    def __init__(self, folder, monkeypatch, *, rank=0, **settings):
        self.folder, self.recorder, self.clock = folder, Recorder(), FakeClock()
        self.engine = SimpleNamespace(
            global_steps=WARMUP_STEPS,
            train_micro_batch_size_per_gpu=lambda: 4,
            gradient_accumulation_steps=lambda: 4,
        )
        self.reading, self.options = SLOW_LINK, OPTIONS
        context = SimpleNamespace(
            engine=lambda: self.engine,
            identity=ProcessInfo(rank=rank, local_rank=rank, world_size=2, host="a", attempt=0),
            settings=Settings(tuner=settings),
            folder=lambda: folder,
            recorder=self.recorder,
            fail_open=FailOpen(),
        )
        knobs = SimpleNamespace(values=lambda: CONFIGURATION, options=lambda: self.options)
        monkeypatch.setattr(observer_module, "metrics_between", lambda before, after: self.reading)
        monkeypatch.setattr(read_only_knobs, "ReadOnlyKnobs", lambda engine, world_size: knobs)
        monkeypatch.setattr(advisor_module, "job_facts", lambda engine: tuner_input().facts)
        monkeypatch.setattr(advisor_module, "is_data_parallel", lambda engine: True)
        self.advisor = Advisor(context, send=lambda span: None, now=self.clock)
        self.advisor.poll()

    def later(self, seconds=MIN_SECONDS, steps=MIN_STEPS):
        """Train for a while, and diagnose again."""
        self.clock.seconds += seconds
        self.engine.global_steps += steps
        self.advisor.poll()

    def advised(self):
        file = self.folder / DECISIONS_FILE
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["knob"] for line in lines]


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    return lambda **options: Run(tmp_path, monkeypatch, **options)


def test_an_advice_is_given_once(make_run, caplog):
    caplog.set_level(logging.INFO)
    run = make_run()

    for _ in range(3):
        run.later()

    assert run.advised() == ["micro_batch_samples"]
    assert len(caplog.messages) == 1
    assert run.recorder.snapshot().value(tuner.TUNER_DECISIONS, "advised") == 1


def test_once_an_advice_is_applied_the_next_one_is_given(make_run):
    run = make_run(numerics="statistical")
    run.options = {"micro_batch_samples": (4, 16)}
    run.later()

    run.options = {"gradient_compression": (None, "int8")}
    run.later()

    assert run.advised() == ["micro_batch_samples", "gradient_compression"]


@pytest.mark.parametrize(("seconds", "steps"), [(MIN_SECONDS, 3), (1.0, MIN_STEPS)])
def test_a_short_interval_gives_no_advice(make_run, seconds, steps):
    run = make_run()

    run.later(seconds, steps)

    assert run.advised() == []


def test_symptoms_state_and_knobs_are_metrics(make_run):
    run = make_run()

    run.later()

    snapshot = run.recorder.snapshot()
    assert snapshot.value(tuner.TUNER_SYMPTOM, "comm_bandwidth") == 0.4
    assert snapshot.value(tuner.TUNER_STATE, "observe") == 1
    assert snapshot.value(tuner.TUNER_KNOB_VALUE, "micro_batch_samples") == 4


def test_a_run_without_symptoms_gets_no_advice(make_run):
    run = make_run()
    run.reading = MetricsDelta(seconds=30.0, steps=40.0, world_size=2)

    run.later()

    assert run.advised() == []
    assert run.recorder.snapshot().value(tuner.TUNER_SYMPTOM, "comm_bandwidth") == 0


def test_thresholds_are_those_of_the_settings(make_run):
    run = make_run(max_exposed_comm_ratio=0.7, min_device_utilization_ratio=0.1)

    run.later()

    assert run.advised() == []


def test_what_the_numerics_setting_forbids_is_not_advised(make_run):
    run = make_run(numerics="bitwise")

    run.later()

    assert "micro_batch_samples" not in run.advised()


def test_without_pure_data_parallelism_nothing_is_advised(make_run, monkeypatch):
    run = make_run()
    monkeypatch.setattr(advisor_module, "is_data_parallel", lambda engine: False)

    run.later()

    assert run.advised() == []
    assert run.recorder.snapshot().value(tuner.TUNER_SYMPTOM, "comm_bandwidth") == 0.4


@pytest.mark.parametrize("options", [{"rank": 1}, {"mode": "off"}])
def test_other_ranks_and_mode_off_publish_nothing(make_run, options):
    run = make_run(**options)

    run.later()

    assert run.advised() == []
    assert run.recorder.snapshot().values == {}


def test_a_deepspeed_with_other_internals_only_disables_the_advice(make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "zerowatch.runtime.tuner.knobs.read_only_knobs", None)
    run = make_run()

    run.later()

    assert run.advised() == []


def test_the_tuner_of_a_run_takes_the_reporter_over(make_run):
    run = make_run()

    reporter = run.advisor.transfer_reporter("auto")
    run.later()
    reporter.on_state(State.WARMUP)

    assert run.advised() == []
    assert run.recorder.snapshot().value(tuner.TUNER_STATE, "warmup") == 1


def test_nothing_is_advised_once_disabled(make_run):
    run = make_run()

    run.advisor.disable()
    run.later()

    assert run.advised() == []


@pytest.mark.jobs
def test_a_plain_deepspeed_script_is_advised(tmp_path):
    variables = {
        "ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS": "0.5",
        "ZEROWATCH_TUNER_MAX_EXPOSED_COMM_RATIO": "0.02",
        "ZEROWATCH_TUNER_REBUILD": "false",
    }
    script = SCRIPTS / "monitor" / "advised_job.py"

    finished = start_ranks(2, "-m", "zerowatch", script, cwd=tmp_path, variables=variables)

    assert finished.returncode == 0, finished.stderr
    (run,) = (tmp_path / "runs").iterdir()
    records = list(map(parse_line, (run / DECISIONS_FILE).read_bytes().splitlines()))
    assert {record.decision.verdict for record in records} == {"advised"}
    assert "micro_batch_samples" in {record.decision.knob for record in records}
    assert '+  "train_micro_batch_size_per_gpu": 4,' in finished.stderr
    assert [replay(record) for record in records] == [ReplayDifference()] * len(records)


def test_auto_without_a_training_run_is_logged_once_as_advice_only(make_run, caplog):
    run = make_run(mode="auto")
    run.later()

    warnings = [one for one in caplog.messages if "TrainingRun" in one]

    assert len(warnings) == 1
