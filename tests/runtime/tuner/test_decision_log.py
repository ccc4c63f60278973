"""The decision log and the history on disk: complete, readable, robust."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.tuner_decisions import decision
from replay_decisions import PARSE_ERRORS, parse_line

from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE, DecisionLog, make_record
from zerowatch.runtime.tuner.policy.history_file import (
    MAX_CONTEXTS,
    HistoryEntry,
    HistoryFile,
    job_fingerprint,
)

CONFIGURATION = {"micro_batch_samples": 16, "gradient_compression": None, "overlap_comm": True}
DENIED = frozenset({("gradient_compression", None), ("gradient_compression", "int8")})

NOTHING = HistoryEntry(configuration={}, denied=frozenset())


def decided(found, number=1):
    return make_record(found, number=number, unix_seconds=1.8e9, step=41, world_size=2, mode="auto")


@pytest.mark.parametrize("seconds_after", [0.03, 0.07, 0.2, None])
def test_a_decision_and_all_it_was_made_from_can_be_read_back(tmp_path, seconds_after):
    found = decision(seconds_after)

    DecisionLog().write(tmp_path, decided(found), found)

    (line,) = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    read = parse_line(line)
    assert read.decision == decided(found)
    assert read.plan == found.plan
    assert tuple(read.times) == tuple(found.times)
    assert read.inputs.reading == found.inputs.reading
    assert read.inputs.facts == found.inputs.facts
    assert read.inputs.denied == found.inputs.denied
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

    _, whole = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    assert parse_line(whole).decision == decided(decision())


def test_without_a_run_folder_nothing_is_written():
    log, found = DecisionLog(), decision()

    log.write(None, decided(found), found)

    assert log.lost == 1


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b'{"schema": 2}', b'{"schema": 1, "plan": 3}', b'{"schema": 1']
)
def test_a_damaged_line_raises_a_parse_error(line):
    with pytest.raises(PARSE_ERRORS):
        parse_line(line)


def history(folder, key="job", owner="here-1", gone=()):
    return HistoryFile(folder, key, owner=owner, is_gone=lambda owner: owner in gone)


def test_the_best_configuration_is_saved_by_job_and_context(tmp_path):
    key, other = (
        job_fingerprint({"parameters": 1, "world": 2}),
        job_fingerprint({"parameters": 2, "world": 2}),
    )
    found = HistoryEntry(configuration=CONFIGURATION, denied=DENIED)

    history(tmp_path / "tuner", key).save("slow link", found)
    history(tmp_path / "tuner", key).save("fast link", NOTHING)

    assert history(tmp_path / "tuner", key).load() == {"slow link": found, "fast link": NOTHING}
    assert history(tmp_path / "tuner", other).load() == {}
    assert [path.name for path in (tmp_path / "tuner").iterdir()] == [f"{key}.json"]


def test_the_latest_verdict_of_a_context_stands(tmp_path):
    for stage in (2, 1):
        found = replace(NOTHING, configuration={"zero_stage": stage})
        history(tmp_path).save("slow link", found)

    assert history(tmp_path).load()["slow link"].configuration == {"zero_stage": 1}


def test_of_very_many_contexts_the_newest_are_kept(tmp_path):
    for number in range(MAX_CONTEXTS + 2):
        history(tmp_path).save(f"context {number}", NOTHING)

    assert list(history(tmp_path).load()) == [
        f"context {number}" for number in range(2, MAX_CONTEXTS + 2)
    ]


def test_the_order_of_facts_does_not_change_the_fingerprint():
    assert job_fingerprint({"world": 2, "parameters": 1}) == job_fingerprint(
        {"parameters": 1, "world": 2}
    )


def test_a_crashed_trial_is_loaded_by_the_next_process_only(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    assert history(tmp_path, "other").load_crashed_trials() == []
    assert history(tmp_path, owner="here-2", gone=["here-1"]).load_crashed_trials() == [
        {"zero_stage": 1}
    ]
    assert history(tmp_path, owner="here-3", gone=["here-1"]).load_crashed_trials() == []


def test_a_trial_of_a_running_process_is_not_loaded(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    assert history(tmp_path, owner="here-2").load_crashed_trials() == []
    assert len(list(tmp_path.iterdir())) == 1


def test_an_earlier_process_of_the_same_name_has_crashed(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    assert history(tmp_path).load_crashed_trials() == [{"zero_stage": 1}]


def test_a_finished_trial_leaves_no_file(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    history(tmp_path).save_trial({})

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 0}',
        '{"schema": 1}',
        '{"schema": 1, "contexts": {"a": 1}}',
        '{"schema": 1, "contexts": {"a": {"configuration": {"k": []}, "denied": []}}}',
    ],
)
def test_a_damaged_history_is_ignored_with_a_warning(tmp_path, caplog, text):
    (tmp_path / "job.json").write_text(text)

    assert history(tmp_path).load() == {}

    assert caplog.messages[0].startswith(f"tuner history {tmp_path / 'job.json'} is ignored: ")


def test_a_history_that_cannot_be_written_is_logged_and_not_raised(tmp_path, caplog):
    (tmp_path / "file").touch()

    history(tmp_path / "file").save("a", NOTHING)
    history(tmp_path / "file").save_trial({})

    assert any("cannot write the tuner's history" in line for line in caplog.messages)


def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = history(None)

    nowhere.save("a", NOTHING)
    nowhere.save_trial({"zero_stage": 1})

    assert nowhere.load() == {}
    assert nowhere.load_crashed_trials() == []
    assert list(tmp_path.iterdir()) == []
