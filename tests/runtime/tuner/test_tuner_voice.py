"""What the tuner finds and decides is told in metrics, the log, the log and traces."""

from __future__ import annotations

import json
import logging

import pytest
from fakes.tuner_decisions import SLOW_LINK, conclusion, situation

from zerowatch.metrics.catalog import tuner
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.tuner.metrics import TunerMetrics, number_of
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE
from zerowatch.runtime.tuner.policy.types import Symptom
from zerowatch.runtime.tuner.reporting import TunerReporter


class Told:
    """A voice, and where its words went."""

    def __init__(self, folder, mode="auto"):
        self.recorder, self.spans = Recorder(), []
        self.folder = folder
        self.voice = TunerReporter(
            self.recorder,
            folder=lambda: folder,
            step=lambda: 41,
            world_size=2,
            mode=mode,
            send=self.spans.append,
            clock=lambda: 1.8e9,
        )

    def value(self, spec, *labels):
        return self.recorder.snapshot().value(spec, *labels)

    def lines(self):
        return list(map(json.loads, (self.folder / DECISIONS_FILE).read_text().splitlines()))


@pytest.fixture
def told(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return Told(tmp_path)


def test_counters_begin_at_0_so_that_the_first_one_is_a_rise():
    recorder = Recorder()

    TunerMetrics(recorder)

    values = recorder.snapshot().values
    assert set(values[tuner.TUNER_DECISIONS].values()) == {0}
    assert len(values[tuner.TUNER_DECISIONS]) == 4
    assert values[tuner.TUNER_EXPLORATION_SECONDS] == {(): 0}


def test_exactly_one_state_is_on(told):
    told.voice.state("observe")
    told.voice.state("trial")

    states = told.recorder.snapshot().values[tuner.TUNER_STATE]
    assert [state for (state,), on in states.items() if on] == ["trial"]
    assert len(states) == len(tuner.TUNER_STATES)


def test_what_is_no_symptom_any_more_is_told_as_0(told):
    told.voice.diagnosed([Symptom(name="data_bound", ratio=0.3, evidence={})], SLOW_LINK)
    told.voice.diagnosed([Symptom(name="comm_latency", ratio=0.2, evidence={})], SLOW_LINK)

    assert told.value(tuner.TUNER_SYMPTOM, "data_bound") == 0
    assert told.value(tuner.TUNER_SYMPTOM, "comm_latency") == 0.2


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
def test_a_knobs_value_is_told_as_a_number(told, value, number):
    told.voice.configured({"knob": value})

    assert told.value(tuner.TUNER_KNOB_VALUE, "knob") == number == number_of(value)


def test_what_goes_on_trial_is_told_with_why(told, caplog):
    found = conclusion()

    told.voice.tries(found.proposal, found.situation.configuration)

    assert caplog.messages == [
        f"step 41: trying micro_batch_samples 4 -> 16 ({found.proposal.why})"
    ]


def test_a_decision_is_told_everywhere(told, caplog):
    found = conclusion()

    told.voice.concluded(found)

    assert told.value(tuner.TUNER_DECISIONS, "accepted") == 1
    assert told.value(tuner.TUNER_GAIN, "micro_batch_samples") == found.judgement.gain
    assert told.value(tuner.TUNER_GAIN_LOWER_BOUND, "micro_batch_samples") == found.judgement.lower
    assert told.value(tuner.TUNER_EXPLORATION_SECONDS) == 1.5
    (message,) = caplog.messages
    assert message.startswith("step 41: ")
    assert message.endswith(": kept")
    (line,) = told.lines()
    assert (line["number"], line["step"], line["verdict"]) == (1, 41, "accepted")
    (span,) = told.spans
    assert span.attributes["zerowatch.tuner.sentence"] == message
    assert span.attributes["zerowatch.tuner.gain"] == found.judgement.gain


def test_a_span_lasts_as_long_as_its_trial(told):
    found = conclusion()

    told.voice.concluded(found)

    (span,) = told.spans
    assert span.end_ns == 1.8e18
    assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(32 * sum(found.times))


def test_decisions_are_numbered(told):
    for _ in range(3):
        told.voice.concluded(conclusion())

    assert [line["number"] for line in told.lines()] == [1, 2, 3]


def test_an_advice_comes_with_what_to_type(told, caplog):
    told.voice.concluded(conclusion(None))

    assert caplog.messages[0].splitlines()[1:] == [
        '-  "train_micro_batch_size_per_gpu": 4,',
        '+  "train_micro_batch_size_per_gpu": 16,',
        '-  "gradient_accumulation_steps": 4,',
        '+  "gradient_accumulation_steps": 1,',
        "+ DataLoader(..., batch_size=16), or what else cuts batches",
    ]
    assert told.value(tuner.TUNER_DECISIONS, "advised") == 1
    assert tuner.TUNER_GAIN not in told.recorder.snapshot().values


def test_several_knobs_share_one_gain(told):
    best = {"micro_batch_samples": 16, "overlap_comm": True}

    told.voice.concluded(conclusion(remembered=best, symptoms=situation().symptoms))

    assert told.lines()[0]["knob"] == "several"
    assert told.value(tuner.TUNER_GAIN, "several") > 1


def test_what_holds_training_back_is_told_once(told, caplog):
    symptoms = situation().symptoms

    told.voice.diagnosed(symptoms, None)
    told.voice.diagnosed(symptoms, None)

    (line,) = caplog.messages
    assert line.startswith("step 41: communication takes ")
    assert line.endswith(": looking for what helps")


def test_what_is_only_advised_says_so_itself(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    Told(tmp_path, mode="advise").voice.diagnosed(situation().symptoms, None)

    assert not caplog.messages
