"""Tests of what a process knows of its job from the launcher's environment variables."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from zerowatch.runtime.common.process_info import (
    ProcessInfo,
    launcher_identity,
    launcher_may_restart,
    launcher_run_id,
    launcher_start,
    new_run_id,
    this_process,
)

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
TORCHRUN = ("RESTART_COUNT", "ERROR_FILE", "MAX_RESTARTS", "RUN_ID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *(f"TORCHELASTIC_{each}" for each in TORCHRUN)):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}" if name in TORCHRUN else name, value)


def test_without_a_launcher_a_process_is_the_only_rank() -> None:
    assert this_process() == ProcessInfo(
        rank=0, local_rank=0, world_size=1, host=socket.gethostname(), attempt=0
    )


def test_without_a_process_group_the_launcher_s_variables_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, RANK="11", LOCAL_RANK="3", WORLD_SIZE="16", RESTART_COUNT="2")

    assert this_process() == ProcessInfo(
        rank=11, local_rank=3, world_size=16, host=socket.gethostname(), attempt=2
    )


def test_run_ids_are_unique_and_sort_by_time() -> None:
    first, second = new_run_id(), new_run_id()

    assert re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]{6}", first)
    assert first != second


@pytest.mark.parametrize(
    ("limit", "name", "may_restart", "run_id"),
    [
        (None, "night", False, None),
        ("0", "night", False, None),
        ("3", "night", True, "night"),
        ("3", "none", True, None),
        ("3", None, True, None),
        ("3", "not a/valid id", True, None),
    ],
)
def test_torchrun_s_id_counts_only_if_torchrun_may_restart_the_job(
    monkeypatch: pytest.MonkeyPatch,
    limit: str | None,
    name: str | None,
    may_restart: bool,
    run_id: str | None,
) -> None:
    given = {"MAX_RESTARTS": limit, "RUN_ID": name}
    set_variables(monkeypatch, **{key: text for key, text in given.items() if text is not None})

    assert (launcher_may_restart(), launcher_run_id()) == (may_restart, run_id)


def agent_file(folder: Path, attempt: int, local_rank: int) -> str:
    """Make the folder of an attempt as torchrun's agent does, and return a rank's error file."""
    place = folder / f"attempt_{attempt}" / str(local_rank)
    place.mkdir(parents=True)
    return str(place / "error.json")


def test_an_agent_has_one_identity_in_all_attempts_and_a_start_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities, starts = [], []
    for agent, attempt, local_rank in (("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)):
        set_variables(monkeypatch, ERROR_FILE=agent_file(tmp_path / agent, attempt, local_rank))
        identities.append(launcher_identity())
        starts.append(launcher_start())

    assert None not in identities + starts
    assert identities[0] == identities[1] == identities[2] != identities[3]
    assert len({starts[0], starts[2], starts[3]}) == 3
    assert all(each is not None and re.fullmatch("[0-9a-f]{16}", each) for each in identities)


def test_processes_of_a_worker_have_the_same_start_and_an_attempt_that_is_made_again_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, ERROR_FILE=agent_file(tmp_path, 0, 0))
    first, again = launcher_start(), launcher_start()
    os.utime(tmp_path / "attempt_0", ns=(1, 1))

    assert first is not None
    assert first == again != launcher_start()


@pytest.mark.parametrize("file", ["", "/somewhere/else/error.json", "error.json"])
def test_a_process_that_torchrun_did_not_start_has_no_agent(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    set_variables(monkeypatch, ERROR_FILE=file)

    assert (launcher_identity(), launcher_start()) == (None, None)


def test_of_a_deleted_attempt_only_the_agent_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, ERROR_FILE=str(tmp_path / "attempt_0" / "0" / "error.json"))

    assert launcher_identity() is not None
    assert launcher_start() is None
