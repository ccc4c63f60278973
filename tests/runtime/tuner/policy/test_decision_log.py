"""Tests of the decision log: complete lines that can be read back, no error from the disk."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.tuner_decisions import decision
from replay_decisions import PARSE_ERRORS, parse_line

from zerowatch.metrics.thresholds import DATA_RATIO_HIGH
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE, DecisionLog, make_record
from zerowatch.runtime.tuner.policy.policy_types import Symptom


def decided(found, number=1):
    return make_record(
        found,
        number=number,
        unix_seconds=1.8e9,
        step=41,
        in_use={"micro_batch_samples": 16},
        world_size=2,
        mode="auto",
    )


@pytest.mark.parametrize("seconds_after", [0.03, 0.07, 0.2, None])
def test_a_decision_and_all_it_was_made_from_can_be_read_back(tmp_path, seconds_after):
    found = decision(seconds_after)

    DecisionLog().write(tmp_path, decided(found), found)

    (line,) = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    read = parse_line(line)
    assert read.decision == decided(found)
    assert read.design == found.design
    assert tuple(read.times) == tuple(found.times)
    assert read.inputs.reading == found.inputs.reading
    assert read.inputs.facts == found.inputs.facts
    assert read.inputs.excluded == found.inputs.excluded
    assert read.inputs.symptoms == found.inputs.symptoms


def test_decisions_are_lines_one_after_another(tmp_path):
    log, found = DecisionLog(), decision()

    for number in (1, 2, 3):
        log.write(tmp_path / "run", decided(found, number), found)

    text = (tmp_path / "run" / DECISIONS_FILE).read_text()
    assert [json.loads(line)["number"] for line in text.splitlines()] == [1, 2, 3]
    assert text.endswith("\n")


def test_a_line_has_the_keys_that_users_search_for(tmp_path):
    found = decision()

    DecisionLog().write(tmp_path, decided(found), found)

    line = json.loads((tmp_path / DECISIONS_FILE).read_text())
    assert (line["schema"], line["knob"]) == (1, "micro_batch_samples")
    assert (line["verdict"], line["numerics"], line["mode"]) == (
        "accepted",
        "reassociation",
        "auto",
    )
    assert line["changes"] == [{"knob": "micro_batch_samples", "before": 4, "after": 16}]


def test_a_threshold_among_the_inputs_is_written_as_a_number(tmp_path):
    symptom = Symptom(name="data_bound", ratio=0.3, evidence={"limit_ratio": DATA_RATIO_HIGH})
    found = decision()
    found = replace(found, inputs=replace(found.inputs, symptoms=(symptom,)))

    DecisionLog().write(tmp_path, decided(found), found)

    line = json.loads((tmp_path / DECISIONS_FILE).read_text())
    assert line["inputs"]["symptoms"][0]["evidence"] == {"limit_ratio": 0.1}


def test_a_disk_error_is_logged_once_and_not_raised(tmp_path, caplog):
    (tmp_path / "file").touch()
    log, found = DecisionLog(), decision()

    log.write(tmp_path / "file", decided(found), found)
    log.write(tmp_path / "file", decided(found), found)

    assert log.lost == 2
    (line,) = caplog.messages
    assert line.startswith(f"cannot write {tmp_path / 'file' / DECISIONS_FILE}: ")


def test_a_line_that_a_full_disk_cut_short_damages_no_other(tmp_path):
    log = DecisionLog()
    (tmp_path / DECISIONS_FILE).write_bytes(b'{"schema": 1, "kno')

    log.write(tmp_path, decided(decision()), decision())

    (whole,) = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    assert parse_line(whole).decision == decided(decision())


def test_without_a_run_folder_nothing_is_written():
    log, found = DecisionLog(), decision()

    log.write(None, decided(found), found)

    assert log.lost == 1


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b'{"schema": 2}', b'{"schema": 1, "design": 3}', b'{"schema": 1']
)
def test_a_damaged_line_raises_a_parse_error(line):
    with pytest.raises(PARSE_ERRORS):
        parse_line(line)


def test_a_symbolic_link_is_not_followed(tmp_path, caplog):
    log, found = DecisionLog(), decision()
    (tmp_path / "target").write_text("keep")
    (tmp_path / DECISIONS_FILE).symlink_to(tmp_path / "target")

    log.write(tmp_path, decided(found), found)

    assert (tmp_path / "target").read_text() == "keep"
    assert log.lost == 1
    assert len(caplog.records) == 1
