"""Tests of how local rank 0 names the run folder to the launcher that started it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerowatch.runtime.common.launcher_link import (
    has_launcher,
    receive_run_folder,
    send_run_folder,
)

VARIABLE = "_ZEROWATCH_RUN_FOLDER_FILE"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_without_a_launcher_nothing_is_sent(tmp_path: Path) -> None:
    send_run_folder(tmp_path, rank=0)

    assert not has_launcher()


def test_the_launcher_receives_each_folder_and_leaves_no_trace(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with receive_run_folder(tmp_path) as receiver:
        before = receiver.folders()
        seen = has_launcher()
        received = []
        for folder in (one, two, one, two):  # two trainings, and both again after a restart
            send_run_folder(folder, rank=0)
            received.append(receiver.folders())
        file = Path(os.environ[VARIABLE].partition(" ")[2])

    assert (before, seen) == ([], True)
    assert received == [[one], [one, two], [two, one], [one, two]]
    assert not file.parent.exists()
    assert VARIABLE not in os.environ


def test_the_launcher_of_a_node_without_rank_0_receives_only_the_folder_of_run_folders(
    tmp_path: Path,
) -> None:
    with receive_run_folder(tmp_path) as receiver:
        send_run_folder(tmp_path / "shared/run", rank=2)
        before = receiver.folders()
        runs = receiver.runs()
        send_run_folder(tmp_path / "shared/run", rank=0)  # a restart on fewer nodes
        send_run_folder(tmp_path / "shared/run", rank=2)
        after = receiver.folders()

    assert (before, after) == ([], [tmp_path / "shared/run"])
    assert runs == [tmp_path / "shared", tmp_path]


def test_folders_of_run_folders_are_those_that_ranks_named_then_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with receive_run_folder(Path("runs")) as receiver:
        before = receiver.runs()
        for folder in ("runs/one", "other/two", "other/three"):
            send_run_folder(tmp_path / folder, rank=0)
        runs, named = receiver.runs(), receiver.named()

    assert before == [tmp_path / "runs"]
    assert runs == [tmp_path / "other", tmp_path / "runs"]
    assert named == [tmp_path / each for each in ("other/three", "other/two", "runs/one")]


def test_a_launcher_within_a_launcher_gives_the_outer_one_its_variable_back() -> None:
    os.environ[VARIABLE] = "1 /outer"

    with receive_run_folder(Path("runs")):
        during = os.environ[VARIABLE]

    assert during != "1 /outer"
    assert os.environ.pop(VARIABLE) == "1 /outer"


@pytest.mark.parametrize(
    ("process", "is_ours"), [("parent", True), ("this", True), ("other", False)]
)
def test_only_a_process_that_the_launcher_started_has_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str, is_ours: bool
) -> None:
    pid = {"parent": os.getppid(), "this": os.getpid(), "other": 1234567}[process]
    file = tmp_path / "with a space"
    monkeypatch.setenv(VARIABLE, f"{pid} {file}")

    send_run_folder(tmp_path / "run", rank=0)

    assert has_launcher() is is_ours
    assert file.exists() is is_ours


def test_a_launcher_without_a_file_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(os.getppid()))

    assert not has_launcher()


def test_a_launcher_that_has_ended_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").touch()
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} {tmp_path}/gone/file")

    send_run_folder(tmp_path, rank=0)

    assert [each.name for each in tmp_path.iterdir()] == ["gone"]
