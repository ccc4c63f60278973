"""Tests of the file_sd file of the runs: each address has the labels of the newest run."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fakes.clock import FakeClock

from zerowatch.dashboards.stack.run_targets import (
    WITHDRAWN_SECONDS,
    RunTargets,
    newest_targets,
    write_if_changed,
)


def write_run(runs: Path, name: str, *addresses: str, at: float = 0.0) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    targets = [
        {"targets": [address], "labels": {"run": name, "rank": str(rank)}}
        for rank, address in enumerate(addresses)
    ]
    file = folder / "targets.json"
    file.write_text(json.dumps(targets))
    os.utime(file, (at, at))
    return file


def owners(runs: Path) -> dict[str, str]:
    return {target["targets"][0]: target["labels"]["run"] for target in newest_targets(runs)}


def test_an_address_of_two_runs_belongs_to_the_newer_run(tmp_path: Path) -> None:
    write_run(tmp_path, "b-old", "127.0.0.1:9464", "127.0.0.1:9465", at=100)
    write_run(tmp_path, "a-new", "127.0.0.1:9464", at=200)

    assert owners(tmp_path) == {"127.0.0.1:9464": "a-new", "127.0.0.1:9465": "b-old"}


def test_simultaneous_runs_are_both_listed(tmp_path: Path) -> None:
    write_run(tmp_path, "one", "127.0.0.1:9464")
    write_run(tmp_path, "two", "127.0.0.1:9564")

    assert owners(tmp_path) == {"127.0.0.1:9464": "one", "127.0.0.1:9564": "two"}


def test_an_incomplete_file_is_ignored(tmp_path: Path) -> None:
    write_run(tmp_path, "one", "127.0.0.1:9464")
    write_run(tmp_path, "two", "127.0.0.1:9564").write_text('[{"targets": ["127')
    write_run(tmp_path, "three", "127.0.0.1:9664").write_text('{"targets": 1}')

    assert owners(tmp_path) == {"127.0.0.1:9464": "one"}


def test_without_runs_there_are_no_targets(tmp_path: Path) -> None:
    assert newest_targets(tmp_path / "runs") == []


def test_the_file_is_written_only_if_its_content_changes(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    write_if_changed(file, [])
    os.utime(file, (1, 1))

    write_if_changed(file, [])
    untouched = file.stat().st_mtime
    write_if_changed(file, [{"targets": ["a:1"], "labels": {}}])

    assert untouched == 1
    assert json.loads(file.read_text()) == [{"targets": ["a:1"], "labels": {}}]


def test_a_withdrawn_address_is_listed_until_its_last_scrape(tmp_path: Path) -> None:
    clock = FakeClock()
    file = write_run(tmp_path, "one", "127.0.0.1:9464")
    targets = RunTargets(tmp_path, clock)
    during = targets.read()

    file.write_text("[]")
    clock.seconds += WITHDRAWN_SECONDS - 1
    just_ended = targets.read()
    clock.seconds += 1

    assert len(during) == 1
    assert just_ended == during
    assert targets.read() == []


def test_a_new_run_takes_over_a_withdrawn_address_at_once(tmp_path: Path) -> None:
    targets = RunTargets(tmp_path)
    file = write_run(tmp_path, "one", "127.0.0.1:9464")
    targets.read()

    file.write_text("[]")
    write_run(tmp_path, "two", "127.0.0.1:9464")

    assert [target["labels"]["run"] for target in targets.read()] == ["two"]
