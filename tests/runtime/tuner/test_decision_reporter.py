"""Diagnoses and decisions are reported in metrics, the log, decisions.jsonl and traces."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
from fakes.tuner_decisions import decision, tuner_input

from zerowatch.metrics.catalog import tuner
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.tuner.decision_reporter import DecisionReporter, TunerMetrics, to_number
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE
from zerowatch.runtime.tuner.policy.policy_types import Numerics, State, Symptom


class Reports:
    """A reporter, and what it published."""

    def __init__(self, folder, mode="auto"):
        self.recorder, self.spans = Recorder(), []
        self.folder = folder
        context = SimpleNamespace(
            recorder=self.recorder,
            folder=lambda: folder,
            engine=lambda: SimpleNamespace(global_steps=41),
            identity=SimpleNamespace(world_size=2),
        )
        self.reporter = DecisionReporter(
            context,
            mode=mode,
            send=self.spans.append,
            clock=lambda: 1.8e9,
        )

    def value(self, spec, *labels):
        return self.recorder.snapshot().value(spec, *labels)

    def lines(self):
        return list(map(json.loads, (self.folder / DECISIONS_FILE).read_text().splitlines()))


@pytest.fixture
def reports(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return Reports(tmp_path)


def test_counters_start_at_0_so_that_the_first_decision_is_an_increase():
    recorder = Recorder()

    TunerMetrics(recorder)

    values = recorder.snapshot().values
    assert set(values[tuner.TUNER_DECISIONS].values()) == {0}
    assert len(values[tuner.TUNER_DECISIONS]) == 6
    assert values[tuner.TUNER_EXPLORATION_SECONDS] == {(): 0}
    assert values[tuner.TUNER_DISCARDED_OBSERVATIONS] == {(): 0}


def test_exactly_one_state_is_on(reports):
    reports.reporter.on_state(State.OBSERVE)
    reports.reporter.on_state(State.TRIAL)

    states = reports.recorder.snapshot().values[tuner.TUNER_STATE]
    assert [state for (state,), on in states.items() if on] == ["trial"]
    assert len(states) == len(tuner.TUNER_STATES)


def test_a_symptom_that_is_gone_is_published_as_0(reports):
    reports.reporter.on_diagnosis([Symptom(name="data_bound", ratio=0.3, evidence={})])
    reports.reporter.on_diagnosis([Symptom(name="comm_latency", ratio=0.2, evidence={})])

    assert reports.value(tuner.TUNER_SYMPTOM, "data_bound") == 0
    assert reports.value(tuner.TUNER_SYMPTOM, "comm_latency") == 0.2


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1),
        (False, 0),
        (None, 0),
        (16, 16),
        ("bf16", 16),
        ("int8", 8),
        ("automatic", 0),
        ("between_steps", 1),
    ],
)
def test_a_knobs_value_is_published_as_a_number(reports, value, number):
    reports.reporter.on_configuration({"knob": value})

    assert reports.value(tuner.TUNER_KNOB_VALUE, "knob") == number == to_number(value)


def test_the_start_of_a_trial_is_logged_with_its_reason(reports, caplog):
    found = decision()

    reports.reporter.on_trial(found.proposal, found.inputs.configuration)

    assert caplog.messages == [
        f"step 41: trying micro_batch_samples 4 -> 16 ({found.proposal.reason})"
    ]


def test_a_decision_is_reported_everywhere(reports, caplog):
    found = decision()

    reports.reporter.on_decision(found)

    assert reports.value(tuner.TUNER_DECISIONS, "accepted") == 1
    assert reports.value(tuner.TUNER_GAIN, "micro_batch_samples") == found.result.gain
    assert reports.value(tuner.TUNER_GAIN_LOWER_BOUND, "micro_batch_samples") == found.result.lower
    assert reports.value(tuner.TUNER_EXPLORATION_SECONDS) == 1.5
    (message,) = caplog.messages
    assert message.startswith("step 41: ")
    assert message.endswith(": accepted")
    (line,) = reports.lines()
    assert (line["number"], line["step"], line["verdict"]) == (1, 41, "accepted")
    (span,) = reports.spans
    assert span.attributes["zerowatch.tuner.sentence"] == message
    assert span.attributes["zerowatch.tuner.gain"] == found.result.gain


def test_a_span_lasts_as_long_as_its_trial(reports):
    found = decision()

    reports.reporter.on_decision(found)

    (span,) = reports.spans
    assert span.end_ns == 1.8e18
    assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(32 * sum(found.times))


def test_decisions_are_numbered(reports):
    for _ in range(3):
        reports.reporter.on_decision(decision())

    assert [line["number"] for line in reports.lines()] == [1, 2, 3]


def test_an_advice_has_the_diff_of_the_ds_config(reports, caplog):
    reports.reporter.on_decision(decision(None))

    assert caplog.messages[0].splitlines()[1:] == [
        '-  "train_micro_batch_size_per_gpu": 4,',
        '+  "train_micro_batch_size_per_gpu": 16,',
        '-  "gradient_accumulation_steps": 4,',
        '+  "gradient_accumulation_steps": 1,',
        "+ DataLoader(..., batch_size=16), TrainingArguments(per_device_train_batch_size=16), or "
        "what else cuts batches",
    ]
    assert reports.value(tuner.TUNER_DECISIONS, "advised") == 1
    assert tuner.TUNER_GAIN not in reports.recorder.snapshot().values


def test_several_knobs_share_one_gain(reports):
    best = {"micro_batch_samples": 16, "overlap_comm": True}

    reports.reporter.on_decision(decision(remembered=best, symptoms=tuner_input().symptoms))

    assert reports.lines()[0]["knob"] == "several"
    assert reports.value(tuner.TUNER_GAIN, "several") > 1


def test_a_new_symptom_is_logged_once(reports, caplog):
    symptoms = tuner_input().symptoms

    reports.reporter.on_diagnosis(symptoms)
    reports.reporter.on_diagnosis(symptoms)

    (line,) = caplog.messages
    assert line.startswith("step 41: communication takes ")
    assert line.endswith(": searching for a change")


def test_an_advisors_symptoms_are_not_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    Reports(tmp_path, mode="advise").reporter.on_diagnosis(tuner_input().symptoms)

    assert not caplog.messages


def test_the_start_of_the_tuner_is_logged(reports, caplog):
    reports.reporter.on_start(numerics=Numerics.BITWISE, interval_seconds=20.0)

    (message,) = caplog.messages
    assert message.startswith("tuner: on, observing 20 s")
    assert message.endswith("bitwise")


def test_observations_without_a_diagnosis_are_counted_and_logged_once(reports, caplog):
    for num in (1, 2, 3, 4):
        reports.reporter.on_observation_discarded(num, 15.0 * num)

    (message,) = caplog.messages
    assert "step times changed 3 times in 45 s" in message
    assert "restarts the observation" in message
    assert reports.value(tuner.TUNER_DISCARDED_OBSERVATIONS) == 4


def test_an_advisors_observations_without_a_diagnosis_are_only_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    reports = Reports(tmp_path, mode="advise")

    reports.reporter.on_observation_discarded(3, 45.0)

    assert reports.value(tuner.TUNER_DISCARDED_OBSERVATIONS) == 1
    assert not caplog.messages


def test_a_diagnosis_without_symptoms_is_logged_once_with_its_training_time(reports, caplog):
    for _ in range(3):
        reports.reporter.on_diagnosis((), 21.4)

    (message,) = caplog.messages
    assert "nothing holds this run back" in message
    assert "21 s" in message


def test_without_complete_figures_nothing_is_said_of_no_symptoms(reports, caplog):
    reports.reporter.on_diagnosis(())

    assert caplog.messages == []


def test_a_symptom_is_logged_with_the_training_time_that_it_was_measured_over(reports, caplog):
    reports.reporter.on_diagnosis([Symptom(name="data_bound", ratio=0.3, evidence={})], 21.4)

    (message,) = caplog.messages
    assert "30 % of training time (measured over 21 s of training)" in message


@pytest.mark.parametrize(
    ("risk", "ends"),
    [
        (
            0.1,
            ["no change that needs memory is tried", "searching for a change that needs no memory"],
        ),
        (0.5, ["nothing is tried"]),
    ],
)
def test_a_search_is_not_logged_while_memory_is_likely_to_run_out(reports, caplog, risk, ends):
    evidence = {"oom_risk_ratio": risk, "headroom_ratio": 0.07}
    pressure = Symptom(name="memory_pressure", ratio=risk, evidence=evidence)

    for _ in range(2):
        reports.reporter.on_diagnosis([pressure, *tuner_input().symptoms], 21.4)

    assert [message.rpartition(": ")[2] for message in caplog.messages] == ends


def test_little_memory_alone_is_not_logged_as_a_search(reports, caplog):
    evidence = {"oom_risk_ratio": 0.0, "headroom_ratio": 0.07}

    reports.reporter.on_diagnosis([Symptom(name="memory_pressure", ratio=0.0, evidence=evidence)])

    (message,) = caplog.messages
    assert "7 %" in message
    assert "searching" not in message
