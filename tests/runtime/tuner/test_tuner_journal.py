"""What the tuner decided is on the disk, whole, and can be read back; so is what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.tuner_decisions import conclusion
from replay_decisions import PARSE_ERRORS, parse_line

from zerowatch.runtime.tuner.policy.decision import decide
from zerowatch.runtime.tuner.policy.decision_log import DECISIONS_FILE, DecisionLog
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
    return decide(found, number=number, unix_seconds=1.8e9, step=41, world_size=2, mode="auto")


@pytest.mark.parametrize("seconds_after", [0.03, 0.07, 0.2, None])
def test_a_decision_and_all_it_was_made_from_can_be_read_back(tmp_path, seconds_after):
    found = conclusion(seconds_after)

    DecisionLog(lambda: tmp_path).write(decided(found), found)

    (line,) = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    read = parse_line(line)
    assert read.decision == decided(found)
    assert read.plan == found.plan
    assert tuple(read.times) == tuple(found.times)
    assert read.situation.reading == found.situation.reading
    assert read.situation.facts == found.situation.facts
    assert read.situation.denied == found.situation.denied
    assert read.situation.symptoms == found.situation.symptoms


def test_decisions_are_lines_one_after_another(tmp_path):
    log, found = DecisionLog(lambda: tmp_path / "run"), conclusion()

    for number in (1, 2, 3):
        log.write(decided(found, number), found)

    text = (tmp_path / "run" / DECISIONS_FILE).read_text()
    assert [json.loads(line)["number"] for line in text.splitlines()] == [1, 2, 3]
    assert text.endswith("\n")


def test_a_line_names_what_people_search_for(tmp_path):
    found = conclusion()

    DecisionLog(lambda: tmp_path).write(decided(found), found)

    line = json.loads((tmp_path / DECISIONS_FILE).read_text())
    assert (line["schema"], line["knob"]) == (1, "micro_batch_samples")
    assert (line["verdict"], line["numerics"], line["mode"]) == (
        "accepted",
        "reassociation",
        "auto",
    )
    assert line["changes"] == [{"knob": "micro_batch_samples", "before": 4, "after": 16}]


def test_a_disk_that_fails_is_told_of_once_and_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").touch()
    log, found = DecisionLog(lambda: tmp_path / "file"), conclusion()

    log.write(decided(found), found)
    log.write(decided(found), found)

    assert log.lost == 2
    (line,) = caplog.messages
    assert line.startswith(f"cannot write {tmp_path / 'file' / DECISIONS_FILE}: ")


def test_a_line_that_a_full_disk_cut_short_spoils_no_other(tmp_path):
    log = DecisionLog(lambda: tmp_path)
    (tmp_path / DECISIONS_FILE).write_bytes(b'{"schema": 1, "kno')

    log.write(decided(conclusion()), conclusion())

    _, whole = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    assert parse_line(whole).decision == decided(conclusion())


def test_without_a_run_folder_nothing_is_written():
    log, found = DecisionLog(lambda: None), conclusion()

    log.write(decided(found), found)

    assert log.lost == 1


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b'{"schema": 2}', b'{"schema": 1, "plan": 3}', b'{"schema": 1']
)
def test_a_line_that_is_none_is_one_of_the_known_damages(line):
    with pytest.raises(PARSE_ERRORS):
        parse_line(line)


def memory(folder, key="job", owner="here-1", gone=()):
    return HistoryFile(folder, key, owner=owner, is_gone=lambda owner: owner in gone)


def test_what_proved_best_is_remembered_by_job_and_context(tmp_path):
    key, other = (
        job_fingerprint({"parameters": 1, "world": 2}),
        job_fingerprint({"parameters": 2, "world": 2}),
    )
    found = HistoryEntry(configuration=CONFIGURATION, denied=DENIED)

    memory(tmp_path / "tuner", key).remember("slow link", found)
    memory(tmp_path / "tuner", key).remember("fast link", NOTHING)

    assert memory(tmp_path / "tuner", key).load() == {"slow link": found, "fast link": NOTHING}
    assert memory(tmp_path / "tuner", other).load() == {}
    assert [path.name for path in (tmp_path / "tuner").iterdir()] == [f"{key}.json"]


def test_the_latest_verdict_of_a_context_stands(tmp_path):
    for stage in (2, 1):
        found = replace(NOTHING, configuration={"zero_stage": stage})
        memory(tmp_path).remember("slow link", found)

    assert memory(tmp_path).load()["slow link"].configuration == {"zero_stage": 1}


def test_of_very_many_contexts_the_newest_are_kept(tmp_path):
    for number in range(MAX_CONTEXTS + 2):
        memory(tmp_path).remember(f"context {number}", NOTHING)

    assert list(memory(tmp_path).load()) == [
        f"context {number}" for number in range(2, MAX_CONTEXTS + 2)
    ]


def test_the_order_of_facts_names_no_other_job():
    assert job_fingerprint({"world": 2, "parameters": 1}) == job_fingerprint(
        {"parameters": 1, "world": 2}
    )


def test_what_a_process_died_of_is_told_to_the_next_one_and_no_other(tmp_path):
    memory(tmp_path).on_trial({"zero_stage": 1})

    assert memory(tmp_path, "other").died_of() == []
    assert memory(tmp_path, owner="here-2", gone=["here-1"]).died_of() == [{"zero_stage": 1}]
    assert memory(tmp_path, owner="here-3", gone=["here-1"]).died_of() == []


def test_what_is_on_trial_in_a_process_that_lives_is_its_own_matter(tmp_path):
    memory(tmp_path).on_trial({"zero_stage": 1})

    assert memory(tmp_path, owner="here-2").died_of() == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_process_of_the_same_name_before_this_one_has_died(tmp_path):
    memory(tmp_path).on_trial({"zero_stage": 1})

    assert memory(tmp_path).died_of() == [{"zero_stage": 1}]


def test_what_was_on_trial_and_came_to_its_end_leaves_nothing(tmp_path):
    memory(tmp_path).on_trial({"zero_stage": 1})

    memory(tmp_path).on_trial({})

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
def test_a_damaged_memory_is_left_out_and_told_of(tmp_path, caplog, text):
    (tmp_path / "job.json").write_text(text)

    assert memory(tmp_path).load() == {}

    assert caplog.messages[0].startswith(f"what {tmp_path / 'job.json'} remembers is left out: ")


def test_a_memory_that_cannot_be_written_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").touch()

    memory(tmp_path / "file").remember("a", NOTHING)
    memory(tmp_path / "file").on_trial({})

    assert any("cannot remember this job" in line for line in caplog.messages)


def test_without_a_folder_nothing_is_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = memory(None)

    nowhere.remember("a", NOTHING)
    nowhere.on_trial({"zero_stage": 1})

    assert nowhere.load() == {}
    assert nowhere.died_of() == []
    assert list(tmp_path.iterdir()) == []
