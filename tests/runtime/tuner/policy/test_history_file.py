"""Tests of the history file: saved by job and context, robust against damaged files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from fakes.clock import set_clock

from zerowatch.runtime.tuner.policy import history_file
from zerowatch.runtime.tuner.policy.history_file import (
    KEPT_SECONDS,
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

    def has_ended(self, name):
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


def test_a_crashed_trial_is_loaded_by_each_process_of_the_next_hour_or_else_by_one(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})
    (file,) = tmp_path.iterdir()

    assert history(tmp_path, "other").load_crashed_trials() == []
    assert load_after_crash(tmp_path) == [{"zero_stage": 1}]
    assert load_after_crash(tmp_path) == [{"zero_stage": 1}]
    set_age(file, 2 * KEPT_SECONDS)
    assert load_after_crash(tmp_path) == [{"zero_stage": 1}]
    assert load_after_crash(tmp_path) == []


def load_after_crash(folder):
    return history(folder, owner="here-2", ended=["here-1"]).load_crashed_trials()


def set_age(file, seconds):
    """Make a file look as if it was renewed so many seconds ago."""
    renewed_at = time.time() - seconds
    os.utime(file, (renewed_at, renewed_at))


def test_a_trial_of_a_running_process_is_not_loaded(tmp_path):
    history(tmp_path).save_trial({"zero_stage": 1})

    assert history(tmp_path, owner="here-2").load_crashed_trials() == []
    assert len(list(tmp_path.iterdir())) == 1


def on_host(name, folder, monkeypatch):
    """Return the history of a job that this process runs on a host."""
    monkeypatch.setattr("socket.gethostname", lambda: name)
    return HistoryFile(folder, "job", HostProcesses())


class OtherHosts:
    """A trial on another host, and a clock for this process's checks of it."""

    def __init__(self, folder, monkeypatch):
        self._start, self._seconds, self.monkeypatch = time.monotonic(), 0.0, monkeypatch
        set_clock(monkeypatch, history_file, monotonic=lambda: self._start + self._seconds)
        self.folder = folder
        self.trial = self.on("pod-a")
        self.trial.save_trial({"zero_stage": 1})
        (self.file,) = folder.iterdir()
        self.set_age(60)

    def on(self, host):
        return on_host(host, self.folder, self.monkeypatch)

    def set_age(self, seconds):
        set_age(self.file, seconds)

    def pass_seconds(self, seconds):
        self._seconds += seconds

    def suspected_by(self, run):
        """Return what a run suspects at its next check."""
        self.pass_seconds(RENEWAL_SECONDS)
        return list(run.suspected_trials())


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    return OtherHosts(tmp_path, monkeypatch)


def test_a_run_that_restarts_at_once_on_another_host_suspects_the_trial_of_the_crash(hosts):
    restarted = hosts.on("pod-b")

    assert restarted.load_crashed_trials() == []
    assert list(restarted.suspected_trials()) == [{"zero_stage": 1}]
    hosts.set_age(2 * OTHER_HOST_SECONDS)
    assert hosts.suspected_by(restarted) == [{"zero_stage": 1}]


def test_other_runs_that_find_a_crash_leave_it_to_the_run_that_restarts(hosts):
    sibling, restarted = hosts.on("pod-c"), hosts.on("pod-b")
    sibling.load_crashed_trials()
    hosts.set_age(2 * OTHER_HOST_SECONDS)

    assert hosts.suspected_by(sibling) == [{"zero_stage": 1}]
    assert restarted.load_crashed_trials() == []
    assert hosts.suspected_by(restarted) == [{"zero_stage": 1}]


def test_a_trial_that_another_host_renews_is_not_suspected_until_it_is_silent(hosts):
    other = hosts.on("pod-b")
    other.load_crashed_trials()

    hosts.trial.renew_trial()
    assert hosts.suspected_by(other) == []
    hosts.set_age(2 * OTHER_HOST_SECONDS)
    assert hosts.suspected_by(other) == [{"zero_stage": 1}], "it may be in a long step"
    hosts.pass_seconds(RENEWAL_SECONDS)
    hosts.trial.renew_trial()
    assert hosts.suspected_by(other) == []
    hosts.trial.save_trial({"zero_stage": 2})
    hosts.set_age(2 * OTHER_HOST_SECONDS)
    assert hosts.suspected_by(other) == [{"zero_stage": 2}]


def test_a_trial_that_another_host_ends_is_not_suspected_any_more(hosts):
    other = hosts.on("pod-b")
    other.load_crashed_trials()
    assert hosts.suspected_by(other) == [{"zero_stage": 1}]

    hosts.trial.save_trial({})

    assert hosts.suspected_by(other) == []


def test_a_suspected_trial_whose_old_file_another_run_has_deleted_stays_suspected(hosts):
    first, second = hosts.on("pod-b"), hosts.on("pod-c")
    first.load_crashed_trials()
    hosts.set_age(2 * KEPT_SECONDS)
    assert hosts.suspected_by(first) == [{"zero_stage": 1}]

    assert second.load_crashed_trials() == [{"zero_stage": 1}]

    assert not hosts.file.exists()
    assert hosts.suspected_by(first) == [{"zero_stage": 1}]


def test_a_trial_that_ended_long_before_the_first_check_is_not_suspected(hosts):
    other = hosts.on("pod-b")
    other.load_crashed_trials()
    later = time.time() + 2 * KEPT_SECONDS
    set_clock(hosts.monkeypatch, history_file, time=lambda: later)

    hosts.trial.save_trial({})

    assert hosts.suspected_by(other) == []


def test_the_files_of_other_hosts_are_read_once_per_renewal(hosts):
    other = hosts.on("pod-b")
    other.load_crashed_trials()
    other.suspected_trials()

    hosts.file.unlink()
    hosts.pass_seconds(RENEWAL_SECONDS / 2)
    assert list(other.suspected_trials()) == [{"zero_stage": 1}]


def test_a_trial_of_a_process_of_this_host_is_suspected_once_the_process_has_ended(
    tmp_path, monkeypatch
):
    seconds, ended = 0.0, []
    set_clock(monkeypatch, history_file, monotonic=lambda: seconds)
    history(tmp_path).save_trial({"zero_stage": 1})
    other = history(tmp_path, owner="here-2", ended=ended)
    other.load_crashed_trials()
    assert list(other.suspected_trials()) == []

    ended.append("here-1")
    seconds = RENEWAL_SECONDS

    assert list(other.suspected_trials()) == [{"zero_stage": 1}]


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


class Node:
    """A host with one running process id, which is used again."""

    def __init__(self, root, folder):
        self._root, self.folder, self.pid = root, folder, os.getpid()

    def start(self, start_ticks, state="S"):
        """Start a process under the same id as the one before."""
        stat = self._root / "proc" / str(self.pid) / "stat"
        stat.parent.mkdir(parents=True, exist_ok=True)
        fields = [state, *"0" * 18, str(start_ticks), "0"]
        stat.write_text(f"{self.pid} (a) b) {' '.join(fields)}\n")

    def run(self):
        """Return the history of a run in the process, which the process then loads."""
        return HistoryFile(self.folder, "job", HostProcesses(self._root))


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path / "root", tmp_path / "tuner")


def test_a_trial_of_an_earlier_process_with_the_same_id_is_loaded_by_each_run(node):
    for start_ticks in (100, 200):
        node.start(start_ticks)
        run = node.run()
        run.load_crashed_trials()
        run.save_trial({"zero_stage": start_ticks})

    for start_ticks in (300, 400):
        node.start(start_ticks)
        loaded = node.run().load_crashed_trials()
        assert sorted(each["zero_stage"] for each in loaded) == [100, 200]


def test_a_trial_of_an_earlier_run_of_this_process_is_loaded_by_each_run(node):
    node.start(100)
    node.run().save_trial({"zero_stage": 1})

    for _ in range(2):
        run = node.run()
        assert run.load_crashed_trials() == [{"zero_stage": 1}]
        run.save_trial({"zero_stage": 2})
        run.save_trial({})


@pytest.mark.parametrize(
    ("start_ticks", "state", "has_crashed"), [(200, "S", True), (100, "Z", True), (100, "S", False)]
)
def test_a_trial_of_a_process_of_this_host_has_crashed_if_its_id_belongs_to_no_or_another_process(
    node, monkeypatch, start_ticks, state, has_crashed
):
    node.start(100)
    node.run().save_trial({"zero_stage": 1})
    monkeypatch.setattr("os.getpid", lambda: node.pid + 1)
    reader = node.run()

    node.start(start_ticks, state)

    assert reader.load_crashed_trials() == [{"zero_stage": 1}] * has_crashed


def test_a_trial_of_a_process_that_has_exited_has_crashed_at_once(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from zerowatch.runtime.tuner.policy.history_file import HistoryFile\n"
        "HistoryFile(pathlib.Path(sys.argv[1]), 'job').save_trial({'zero_stage': 1})\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert HistoryFile(tmp_path, "job").load_crashed_trials() == []

    assert HistoryFile(tmp_path, "job").load_crashed_trials() == [{"zero_stage": 1}]


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
    assert list(nowhere.suspected_trials()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_logged_once_until_it_is_written(tmp_path, caplog):
    (tmp_path / "tuner").touch()  # where the folder should be
    run = history(tmp_path / "tuner")

    for stage in (1, 2):
        run.save_trial({"zero_stage": stage})
    while_unwritable = len(caplog.messages)
    (tmp_path / "tuner").unlink()
    run.save_trial({"zero_stage": 3})

    assert while_unwritable == 1
    assert load_after_crash(tmp_path / "tuner") == [{"zero_stage": 3}]
