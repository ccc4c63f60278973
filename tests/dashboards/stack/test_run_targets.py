"""Tests of the merged targets: newest run of each address, ended and killed runs, refused files.

Covers `file_lock.py`.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.locked_file import locked_by_another_process

from zerowatch.dashboards.stack import run_targets
from zerowatch.dashboards.stack.run_targets import (
    FORGET_SECONDS,
    MAX_ADDRESSES,
    MAX_FILE_BYTES,
    WITHDRAWN_SECONDS,
    RunTargets,
    TargetFiles,
    newest_targets,
    update_file,
    write_if_changed,
)

NOW = 1_800_000_000.0


def write_run(runs: Path, name: str, *addresses: str, at: float = 0.0) -> Path:
    targets = [
        {"targets": [address], "labels": {"run": name, "rank": str(rank)}}
        for rank, address in enumerate(addresses)
    ]
    return write_file(runs, name, json.dumps(targets), at=at)


def write_file(runs: Path, name: str, text: str, at: float = 0.0) -> Path:
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "targets.json"
    file.write_text(text)
    for path in (file, folder):
        os.utime(path, (at, at))
    return file


def files_of(runs: Path, now: float = 300.0) -> TargetFiles:
    return TargetFiles(runs, lambda: now)


def owners(runs: Path) -> dict[str, str]:
    return {each["targets"][0]: each["labels"]["run"] for each in files_of(runs).read()}


def runs_in(targets: list[dict[str, Any]]) -> list[str]:
    return [target["labels"]["run"] for target in targets]


def test_an_address_of_two_runs_belongs_to_the_newer_run(tmp_path: Path) -> None:
    write_run(tmp_path, "b-old", "127.0.0.1:9464", "127.0.0.1:9465", at=100)
    write_run(tmp_path, "a-new", "127.0.0.1:9464", at=200)

    assert owners(tmp_path) == {"127.0.0.1:9464": "a-new", "127.0.0.1:9465": "b-old"}


def test_simultaneous_runs_are_both_listed(tmp_path: Path) -> None:
    write_run(tmp_path, "one", "127.0.0.1:9464")
    write_run(tmp_path, "two", "127.0.0.1:9564")

    assert owners(tmp_path) == {"127.0.0.1:9464": "one", "127.0.0.1:9564": "two"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"targets": ["127', "no complete JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"targets": 1}', "no list"),
        ('[{"targets": ["a:1"]}]', "no `targets` and `labels`"),
        ('[{"targets": "a:1", "labels": {}}]', "`targets` is no list"),
        ('[{"targets": ["a"], "labels": {}}]', "'a' is no HOST:PORT"),
        ('[{"targets": ["a:1/x?y"], "labels": {}}]', "is no HOST:PORT"),
        ('[{"targets": ["a:1"], "labels": {"rank": 1}}]', "a label is no text"),
        ('[{"targets": ["a:1"], "labels": {"run": "one"}}]', "its label run is 'one'"),
        ('[{"targets": ["a:1"], "labels": {"__param_run": "one"}}]', "__param_run is 'one'"),
        (" " * (MAX_FILE_BYTES + 1), "bytes, more than"),
        (
            json.dumps([{"targets": ["a:1"] * (MAX_ADDRESSES // 2 + 1), "labels": {}}] * 2),
            "it lists more than",
        ),
    ],
)
def test_a_file_that_no_run_of_that_name_writes_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, why: str
) -> None:
    write_run(tmp_path, "one", "127.0.0.1:9464")
    write_file(tmp_path, "two", content)
    files = files_of(tmp_path)

    first, second = files.read(), files.read()

    assert runs_in(first) == ["one"]
    assert second == first
    (line,) = caplog.messages
    assert "two/targets.json is ignored" in line
    assert why in line


@pytest.mark.parametrize("method", ["stat", "read_text"])
def test_a_run_that_this_user_cannot_read_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """As with umask 077. Root may read everything, so the error is raised here."""
    write_run(tmp_path, "one", "127.0.0.1:9464")
    private = write_run(tmp_path, "two", "127.0.0.1:9465")
    original = getattr(Path, method)

    def refuse(self: Path, **arguments: Any) -> Any:
        if self == private:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, **arguments)

    monkeypatch.setattr(Path, method, refuse)
    files = files_of(tmp_path)

    first, second = files.read(), files.read()
    logged = list(caplog.messages)
    monkeypatch.undo()

    assert runs_in(first) == runs_in(second) == ["one"]
    (line,) = logged
    assert str(private) in line
    assert "umask 022" in line
    assert runs_in(files.read()) == ["one", "two"]


def test_a_file_that_would_block_the_reader_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    os.mkfifo(tmp_path / "one" / "targets.json")

    assert files_of(tmp_path).read() == []


def test_only_the_labels_of_a_rank_are_taken(tmp_path: Path) -> None:
    labels = {"run": "one", "rank": "0", "node": "n1", "__param_run": "one"}
    more = {"job": "other", "__metrics_path__": "/admin", "__scheme__": "https", "severity": "x"}
    content: list[dict[str, Any]] = [{"targets": ["n1:9464"], "labels": labels | more}]
    write_file(tmp_path, "one", json.dumps(content))

    (target,) = files_of(tmp_path).read()

    assert target == {"targets": ["n1:9464"], "labels": labels}


def test_without_runs_there_are_no_targets(tmp_path: Path) -> None:
    assert newest_targets(tmp_path / "runs") == []


def test_a_file_is_read_again_only_if_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "one", "127.0.0.1:9464", at=100)
    write_run(tmp_path, "two", "127.0.0.1:9564", at=100)
    opened: list[str] = []
    read_text = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self: opened.append(self.parent.name) or read_text(self)
    )
    files = files_of(tmp_path)

    files.read()
    files.read()
    write_run(tmp_path, "two", "127.0.0.1:9664", at=200)
    changed = files.read()

    assert sorted(opened) == ["one", "two", "two"]
    assert [target["targets"][0] for target in changed] == ["127.0.0.1:9464", "127.0.0.1:9664"]


@pytest.mark.parametrize("log_of_rank_0", ["rank-0.jsonl", "metrics-0.jsonl"])
def test_a_killed_run_is_dropped_when_rank_0_has_written_nothing_for_a_day(
    tmp_path: Path, log_of_rank_0: str
) -> None:
    clock = FakeClock()
    clock.seconds = NOW
    write_run(tmp_path, "killed", "n1:9464", at=NOW)
    write_run(tmp_path, "training", "n2:9464", at=NOW)
    log = tmp_path / "training" / log_of_rank_0
    log.write_text("{}\n")
    os.utime(log, (NOW + FORGET_SECONDS, NOW + FORGET_SECONDS))
    files = TargetFiles(tmp_path, clock)

    clock.seconds += FORGET_SECONDS
    after_a_day = runs_in(files.read())
    clock.seconds += 1
    # such as the page of `zerowatch report`, which makes the time of the folder that of today
    (tmp_path / "killed" / "report.html").touch()
    later = runs_in(files.read())

    assert after_a_day == ["killed", "training"]
    assert later == ["training"]


def test_a_dead_run_of_this_host_is_dropped_and_a_live_one_stays(tmp_path: Path) -> None:
    write_run(tmp_path, "crashed-a-week-ago", "127.0.0.1:9464", at=1)
    write_run(tmp_path, "in-a-long-step", "127.0.0.1:9465", at=1)
    file = write_run(tmp_path, "of-another-host-without-locks", "n2:9464", at=1)
    file.with_name("metrics-0.jsonl").touch()

    with locked_by_another_process(tmp_path / "in-a-long-step" / "run.lock"):
        listed = runs_in(newest_targets(tmp_path))
    after_its_end = runs_in(newest_targets(tmp_path))

    assert listed == ["in-a-long-step", "of-another-host-without-locks"]
    assert after_its_end == ["of-another-host-without-locks"]


def test_the_file_is_written_only_if_its_content_changes(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    write_if_changed(file, [])
    os.utime(file, (1, 1))

    write_if_changed(file, [])
    untouched = file.stat().st_mtime
    write_if_changed(file, [{"targets": ["a:1"], "labels": {}}])

    assert untouched == 1
    assert json.loads(file.read_text()) == [{"targets": ["a:1"], "labels": {}}]


def test_after_a_failed_write_the_next_round_writes_and_each_reason_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prometheus" / "targets.json"
    write_run(tmp_path / "runs", "one", "127.0.0.1:9464")
    targets = RunTargets(files_of(tmp_path / "runs"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(run_targets, "atomic_write", full)
        failure = update_file(file, targets)
        failure = update_file(file, targets, failure)
    recovered = update_file(file, targets, failure)

    assert failure == os.strerror(errno.ENOSPC)
    assert recovered == ""
    assert [each.getMessage().startswith(f"{file} ") for each in caplog.records] == [True]
    assert runs_in(json.loads(file.read_text())) == ["one"]


def test_a_withdrawn_address_is_listed_until_its_last_scrape(tmp_path: Path) -> None:
    clock = FakeClock()
    file = write_run(tmp_path, "one", "127.0.0.1:9464")
    targets = RunTargets(files_of(tmp_path), clock)
    during = targets.read()

    file.write_text("[]")
    clock.seconds += WITHDRAWN_SECONDS - 1
    just_ended = targets.read()
    clock.seconds += 1

    assert len(during) == 1
    assert just_ended == during
    assert targets.read() == []


def test_a_new_run_takes_over_a_withdrawn_address_at_once(tmp_path: Path) -> None:
    targets = RunTargets(files_of(tmp_path))
    file = write_run(tmp_path, "one", "127.0.0.1:9464")
    targets.read()

    file.write_text("[]")
    write_run(tmp_path, "two", "127.0.0.1:9464")

    assert runs_in(targets.read()) == ["two"]


def test_an_address_does_not_return_to_a_killed_run_when_the_next_run_ends(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    targets = RunTargets(TargetFiles(tmp_path, clock), clock)
    write_run(tmp_path, "killed", "127.0.0.1:9464", "127.0.0.1:9465", at=100)
    targets.read()
    file = write_run(tmp_path, "next", "127.0.0.1:9464", at=200)
    during = runs_in(targets.read())

    file.write_text("[]")
    clock.seconds += WITHDRAWN_SECONDS - 1
    just_ended = runs_in(targets.read())
    clock.seconds += 1
    later = runs_in(targets.read())
    clock.seconds += 1000
    much_later = runs_in(targets.read())
    write_run(tmp_path, "next", "127.0.0.1:9464", at=300)
    targets.read()
    write_run(tmp_path, "killed", "127.0.0.1:9464", at=400)
    restarted = runs_in(targets.read())

    assert during == just_ended == ["next", "killed"]
    assert later == much_later == ["killed"]  # at the other address, which no run has taken over
    assert restarted[0] == "killed"


@pytest.mark.parametrize("log_of_rank_0", ["rank-0.jsonl", "metrics-0.jsonl"])
def test_an_address_returns_to_a_live_run_after_the_last_scrape_of_the_newer_run(
    tmp_path: Path, log_of_rank_0: str
) -> None:
    """Two hosts share the folder, and the ranks of both serve on 127.0.0.1."""
    clock = FakeClock()
    targets = RunTargets(TargetFiles(tmp_path, clock), clock)
    log = write_run(tmp_path, "live", "127.0.0.1:9464", at=100).with_name(log_of_rank_0)
    log.write_text("{}\n")
    os.utime(log, (210, 210))
    targets.read()
    other = write_run(tmp_path, "other-host", "127.0.0.1:9464", at=200)
    during = runs_in(targets.read())

    other.write_text("[]")
    os.utime(log, (220, 220))
    clock.seconds += WITHDRAWN_SECONDS - 1
    just_ended = runs_in(targets.read())
    clock.seconds += 1
    later = runs_in(targets.read())
    clock.seconds += 1000
    killed_since = runs_in(targets.read())

    assert during == just_ended == ["other-host"]
    assert later == ["live"]
    assert killed_since == ["live"]  # as any killed run, so that `up` is 0


def test_an_address_returns_to_a_run_that_is_locked_but_writes_nothing(tmp_path: Path) -> None:
    """As in a long step, with run_log.metrics_interval_seconds=0."""
    clock = FakeClock()
    files = TargetFiles(tmp_path, clock, asks_locks=True)
    file = write_run(tmp_path, "in-a-long-step", "127.0.0.1:9464", at=100)
    other = write_run(tmp_path, "of-a-container", "127.0.0.1:9464", at=200)

    with locked_by_another_process(file.with_name("run.lock")):
        during = runs_in(files.read())
        other.write_text("[]")
        clock.seconds += WITHDRAWN_SECONDS - 1
        just_ended = runs_in(files.read())
        clock.seconds += 1
        later = runs_in(files.read())

    assert (during, just_ended, later) == (["of-a-container"], [], ["in-a-long-step"])
