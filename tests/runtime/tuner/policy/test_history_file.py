"""Tests of the history file: saved by job and context, robust against damaged files."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from fakes.clock import set_clock

from zerowatch.runtime.tuner.policy import history_file
from zerowatch.runtime.tuner.policy.history_file import (
    MAX_CONTEXTS,
    OTHER_HOST_SECONDS,
    RENEWAL_SECONDS,
    HistoryEntry,
    HistoryFile,
    HostProcesses,
    job_fingerprint,
)

CONFIGURATION = {"micro_batch_samples": 16, "gradient_compression": None, "overlap_comm": True}
EXCLUDED = frozenset({("gradient_compression", None), ("gradient_compression", "int8")})

NOTHING = HistoryEntry(configuration={}, excluded=frozenset())


class FakeProcesses:
    """Names of processes, some of which have ended."""

    def __init__(self, own_name, ended):
        self.own_name, self._ended = own_name, ended

    def has_ended(self, name, silent_seconds):
        return name in self._ended


def history(folder, key="job", owner="here-1", ended=()):
    return HistoryFile(folder, key, FakeProcesses(owner, ended))


def test_the_best_configuration_is_saved_by_job_and_context(tmp_path):
    key, other = (
        job_fingerprint({"parameters": 1, "world": 2}),
        job_fingerprint({"parameters": 2, "world": 2}),
    )
    found = HistoryEntry(configuration=CONFIGURATION, excluded=EXCLUDED)

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


def test_of_very_many_contexts_the_newest_are_saved(tmp_path):
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
    assert history(tmp_path, owner="here-2", ended=["here-1"]).load_crashed_trials() == [
        {"zero_stage": 1}
    ]
    assert history(tmp_path, owner="here-3", ended=["here-1"]).load_crashed_trials() == []


def test_a_trial_of_a_running_process_is_not_loaded(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    assert history(tmp_path, owner="here-2").load_crashed_trials() == []
    assert len(list(tmp_path.iterdir())) == 1


def on_host(name, folder, monkeypatch):
    """Return the history of a job that this process runs on a host."""
    monkeypatch.setattr("socket.gethostname", lambda: name)
    return HistoryFile(folder, "job", HostProcesses())


def test_a_trial_on_another_host_has_crashed_once_it_is_not_renewed(tmp_path, monkeypatch):
    trial, other = (on_host(name, tmp_path, monkeypatch) for name in ("node-a", "node-b"))
    trial.save_trial({"zero_stage": 1})
    (file,) = tmp_path.iterdir()
    long_ago = time.time() - 2 * OTHER_HOST_SECONDS

    os.utime(file, (long_ago, long_ago))
    trial.renew_trial()
    assert (other.load_crashed_trials(), file.exists()) == ([], True)

    os.utime(file, (long_ago, long_ago))
    assert (other.load_crashed_trials(), file.exists()) == ([{"zero_stage": 1}], False)


def test_a_trial_on_another_host_that_was_too_young_is_checked_again(tmp_path, monkeypatch):
    crashed, restarted = (on_host(name, tmp_path, monkeypatch) for name in ("pod-a", "pod-b"))
    crashed.save_trial({"zero_stage": 1})
    (file,) = tmp_path.iterdir()
    assert restarted.load_crashed_trials() == []
    start, seconds = time.monotonic(), 0.0
    set_clock(monkeypatch, history_file, monotonic=lambda: start + seconds)
    long_ago = time.time() - 2 * OTHER_HOST_SECONDS
    os.utime(file, (long_ago, long_ago))

    seconds = OTHER_HOST_SECONDS / 2
    assert (list(restarted.recheck_crashed_trials()), file.exists()) == ([], True)
    seconds = 2 * OTHER_HOST_SECONDS
    assert (restarted.recheck_crashed_trials(), file.exists()) == ([{"zero_stage": 1}], False)
    seconds = 4 * OTHER_HOST_SECONDS
    assert list(restarted.recheck_crashed_trials()) == []


def test_a_renewal_writes_a_deleted_record_again_but_none_after_the_trial(tmp_path, monkeypatch):
    trial = on_host("node-a", tmp_path, monkeypatch)
    trial.save_trial({"zero_stage": 1})
    (file,) = tmp_path.iterdir()
    text, seconds = file.read_text(), time.monotonic()
    set_clock(monkeypatch, history_file, monotonic=lambda: seconds)

    file.unlink()
    trial.renew_trial()
    assert file.read_text() == text

    file.unlink()
    trial.renew_trial()
    assert not file.exists(), "renewed a moment ago"

    trial.save_trial({})
    seconds += 2 * RENEWAL_SECONDS
    trial.renew_trial()
    assert not file.exists()


def test_a_trial_of_an_ended_process_of_this_host_has_crashed_at_once(tmp_path, monkeypatch):
    trial, next_run = (on_host("node-a", tmp_path, monkeypatch) for _ in range(2))
    trial.save_trial({"zero_stage": 1})
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "job.node-a-9999999.trial.json")  # more than the largest process id

    assert next_run.load_crashed_trials() == [{"zero_stage": 1}]


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
        '{"schema": 1, "contexts": {"a": {"configuration": {"k": []}, "excluded": []}}}',
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
    nowhere.renew_trial()

    assert nowhere.load() == {}
    assert list(nowhere.load_crashed_trials()) == []
    assert list(nowhere.recheck_crashed_trials()) == []
    assert list(tmp_path.iterdir()) == []
