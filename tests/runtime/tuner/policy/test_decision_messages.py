"""Tests of the log texts of decisions, symptoms and changes."""

from __future__ import annotations

import pytest
from fakes.tuner_decisions import decision_record

from zerowatch.metrics.catalog.tuner import SYMPTOMS
from zerowatch.runtime.tuner.policy.decision_log import Change
from zerowatch.runtime.tuner.policy.decision_messages import (
    format_decision,
    format_ds_config_diff,
    format_gain,
    format_symptom,
)
from zerowatch.runtime.tuner.policy.knob_registry import KNOBS
from zerowatch.runtime.tuner.policy.policy_types import Symptom


def test_an_accepted_change_has_its_gain_and_interval():
    assert format_decision(decision_record()) == (
        "step 41: communication takes 68 % of training time, most of it bandwidth: "
        "micro_batch_samples 4 -> 16 made training 2.31 times as fast "
        "(2.27 to 2.36, 3 pairs, 18 steps): accepted"
    )


def test_a_rolled_back_change_has_its_reason():
    changes = (Change(knob="overlap_comm", before=False, after=True),)
    found = decision_record(
        changes,
        gain=-0.12,
        lower=-0.15,
        upper=-0.09,
        verdict="rolled_back",
        reason="two blocks were far slower",
    )

    assert format_decision(found).endswith(
        "overlap_comm false -> true made training 12.0 % slower "
        "(-15.0 to -9.0 %, 3 pairs, 18 steps): rolled back, two blocks were far slower"
    )


def test_a_measured_change_without_gain_is_rejected_with_its_reason():
    found = decision_record(
        gain=0.002, lower=-0.01, upper=0.01, verdict="rejected", reason="too little"
    )

    assert format_decision(found).endswith(": rejected, too little")


def test_a_change_that_was_not_tried_is_rejected_with_its_reason():
    found = decision_record(
        gain=None, lower=None, upper=None, pairs=0, steps=0, verdict="rejected", reason="no memory"
    )

    assert format_decision(found).endswith("micro_batch_samples 4 -> 16: rejected, no memory")


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (
            1.2,
            "(fewer reductions) would make training about 2.2 times as fast; advised, not applied",
        ),
        (0.123, "(fewer reductions) would make training about 12 % faster; advised, not applied"),
        (0.001, "(fewer reductions) may help; advised, not applied"),
        (None, "(fewer reductions) may help; advised, not applied"),
    ],
)
def test_an_advice_has_its_predicted_gain_if_there_is_one(gain, text):
    found = decision_record(
        gain=None, verdict="advised", reason="fewer reductions", predicted_gain=gain, mode="advise"
    )

    assert format_decision(found).endswith(text)


def test_all_of_several_knobs_are_named():
    changes = (
        Change(knob="zero_stage", before=2, after=1),
        Change(knob="gradient_compression", before=None, after="int8"),
    )

    found = decision_record(changes)

    assert found.knob == "several"
    assert "zero_stage 2 -> 1, gradient_compression none -> int8 made" in format_decision(found)


@pytest.mark.parametrize("name", SYMPTOMS)
def test_every_symptom_has_its_own_format(name):
    text = format_symptom(Symptom(name=name, ratio=0.42, evidence={}))

    assert name not in text
    assert "42" in text


def test_a_minor_cause_is_given_with_its_own_percentage():
    symptom = Symptom(name="comm_latency", ratio=0.1, evidence={"comm_exposed_ratio": 0.6})

    assert format_symptom(symptom) == ("communication takes 60 % of training time, latency 10 %")


def test_a_slow_rank_0_differs_from_waiting_for_others():
    own = Symptom(name="straggler", ratio=0.3, evidence={"straggler_score_ratio": 0.3})
    others = Symptom(name="straggler", ratio=0.3, evidence={"imbalance_ratio": 0.3})

    assert format_symptom(own) == "rank 0 is slower than the others by 30 % of a step"
    assert format_symptom(others) == "waiting for slower ranks takes 30 % of training time"


@pytest.mark.parametrize(
    ("gain", "text"),
    [(0.0, "as fast as before"), (0.031, "3.1 % faster"), (-0.2, "20.0 % slower")],
)
def test_a_gain_is_formatted_as_relative_speed(gain, text):
    assert format_gain(gain) == text


def test_the_diff_of_the_ds_config_keeps_the_global_batch():
    changes = (
        Change(knob="micro_batch_samples", before=4, after=16),
        Change(knob="overlap_comm", before=False, after=True),
        Change(knob="zero_stage", before=2, after=1),
    )

    assert format_ds_config_diff(changes, accumulation=(4, 1)).splitlines() == [
        '-  "train_micro_batch_size_per_gpu": 4,',
        '+  "train_micro_batch_size_per_gpu": 16,',
        '   "zero_optimization": {',
        '-    "overlap_comm": false,',
        '+    "overlap_comm": true,',
        '-    "stage": 2,',
        '+    "stage": 1,',
        "   },",
        '-  "gradient_accumulation_steps": 4,',
        '+  "gradient_accumulation_steps": 1,',
        "+ DataLoader(..., batch_size=16), TrainingArguments(per_device_train_batch_size=16), or "
        "what else cuts batches",
    ]


def test_offloading_is_written_as_a_device():
    changes = (Change(knob="offload_optimizer", before=False, after=True),)

    assert '+      "device": "cpu",' in format_ds_config_diff(changes)


def test_a_knob_without_a_ds_key_is_a_call():
    changes = (Change(knob="gradient_compression", before=None, after="int8"),)

    assert format_ds_config_diff(changes) == '+ run.compress("int8")'


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_every_knob_can_be_formatted(spec):
    before, after = spec.domain[:2] if isinstance(spec.domain, tuple) else (1, 2)

    patch = format_ds_config_diff((Change(knob=spec.name, before=before, after=after),))

    assert "+" in patch
