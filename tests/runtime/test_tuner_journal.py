"""What the tuner decided is on the disk, whole, and can be read back; so is what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes.tuner_decisions import conclusion

from zerowatch.runtime.tuner.decision import decide
from zerowatch.runtime.tuner.journal import DECISIONS_FILE, Journal
from zerowatch.runtime.tuner.recorded import DAMAGES, recorded
from zerowatch.runtime.tuner.verdict_store import MAX_CONTEXTS, Remembered, VerdictStore, job_key

CONFIGURATION = {"micro_batch_samples": 16, "gradient_compression": None, "overlap_comm": True}
DENIED = frozenset({("gradient_compression", None), ("gradient_compression", "int8")})

NOTHING = Remembered(configuration={}, denied=frozenset())


def decided(found, number=1):
    return decide(found, number=number, unix_seconds=1.8e9, step=41, world_size=2, mode="auto")


@pytest.mark.parametrize("seconds_after", [0.03, 0.07, 0.2, None])
def test_a_decision_and_all_it_was_made_from_can_be_read_back(tmp_path, seconds_after):
    found = conclusion(seconds_after)

    Journal(lambda: tmp_path).write(decided(found), found)

    (line,) = (tmp_path / DECISIONS_FILE).read_bytes().splitlines()
    read = recorded(line)
    assert read.decision == decided(found)
    assert read.plan == found.plan
    assert tuple(read.times) == tuple(found.times)
    assert read.situation.reading == found.situation.reading
    assert read.situation.facts == found.situation.facts
    assert read.situation.denied == found.situation.denied
    assert read.situation.symptoms == found.situation.symptoms


def test_decisions_are_lines_one_after_another(tmp_path):
    journal, found = Journal(lambda: tmp_path / "run"), conclusion()

    for number in (1, 2, 3):
        journal.write(decided(found, number), found)

    text = (tmp_path / "run" / DECISIONS_FILE).read_text()
    assert [json.loads(line)["number"] for line in text.splitlines()] == [1, 2, 3]
    assert text.endswith("\n")


def test_a_line_names_what_people_search_for(tmp_path):
    found = conclusion()

    Journal(lambda: tmp_path).write(decided(found), found)

    line = json.loads((tmp_path / DECISIONS_FILE).read_text())
    assert (line["schema"], line["knob"]) == (1, "micro_batch_samples")
    assert (line["verdict"], line["contract"], line["mode"]) == (
        "accepted",
        "reassociation",
        "auto",
    )
    assert line["changes"] == [{"knob": "micro_batch_samples", "before": 4, "after": 16}]


def test_a_disk_that_fails_is_told_of_once_and_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").touch()
    journal, found = Journal(lambda: tmp_path / "file"), conclusion()

    journal.write(decided(found), found)
    journal.write(decided(found), found)

    assert journal.lost == 2
    (line,) = caplog.messages
    assert line.startswith(f"cannot write {tmp_path / 'file' / DECISIONS_FILE}: ")


def test_without_a_run_folder_nothing_is_written():
    journal, found = Journal(lambda: None), conclusion()

    journal.write(decided(found), found)

    assert journal.lost == 1


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b'{"schema": 2}', b'{"schema": 1, "plan": 3}', b'{"schema": 1']
)
def test_a_line_that_is_none_is_one_of_the_known_damages(line):
    with pytest.raises(DAMAGES):
        recorded(line)


def test_what_proved_best_is_remembered_by_job_and_context(tmp_path):
    key, other = job_key({"parameters": 1, "world": 2}), job_key({"parameters": 2, "world": 2})

    found = Remembered(configuration=CONFIGURATION, denied=DENIED)
    trying = Remembered(configuration={}, denied=frozenset(), on_trial={"zero_stage": 1})

    VerdictStore(tmp_path / "tuner").remember(key, "slow link", found)
    VerdictStore(tmp_path / "tuner").remember(key, "fast link", trying)

    store = VerdictStore(tmp_path / "tuner")
    assert store.load(key) == {
        "slow link": found,
        "fast link": trying,
    }
    assert store.load(other) == {}
    assert [path.name for path in (tmp_path / "tuner").iterdir()] == [f"{key}.json"]


def test_the_latest_verdict_of_a_context_stands(tmp_path):
    store = VerdictStore(tmp_path)

    for stage in (2, 1):
        store.remember("job", "slow link", replace(NOTHING, configuration={"zero_stage": stage}))

    assert store.load("job")["slow link"].configuration == {"zero_stage": 1}


def test_of_very_many_contexts_the_newest_are_kept(tmp_path):
    store = VerdictStore(tmp_path)

    for number in range(MAX_CONTEXTS + 2):
        store.remember("job", f"context {number}", NOTHING)

    assert list(store.load("job")) == [f"context {number}" for number in range(2, MAX_CONTEXTS + 2)]


def test_the_order_of_facts_names_no_other_job():
    assert job_key({"world": 2, "parameters": 1}) == job_key({"parameters": 1, "world": 2})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 0}',
        '{"schema": 2}',
        '{"schema": 2, "contexts": {"a": 1}}',
        '{"schema": 2, "contexts": {"a": {"configuration": {}, "denied": []}}}',
        '{"schema": 2, "contexts": {"a": {"configuration": {"k": []}}}}',
    ],
)
def test_a_damaged_memory_is_left_out_and_told_of(tmp_path, caplog, text):
    (tmp_path / "job.json").write_text(text)
    store = VerdictStore(tmp_path)

    assert store.load("job") == {}

    assert caplog.messages[0].startswith(f"what {tmp_path / 'job.json'} remembers is left out: ")


def test_a_memory_that_cannot_be_written_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").touch()

    VerdictStore(tmp_path / "file").remember("job", "a", NOTHING)

    assert any("cannot remember this job" in line for line in caplog.messages)


def test_without_a_folder_nothing_is_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = VerdictStore(None)

    store.remember("job", "a", NOTHING)

    assert store.load("job") == {}
    assert list(tmp_path.iterdir()) == []
