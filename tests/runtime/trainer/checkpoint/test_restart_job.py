"""Tests of `zerowatch run --max-restarts`: random kills do not change the training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import tiers
from scripts.launching import steps_logged
from scripts.trainer.run_restart_job import RestartResult, train
from servers.free_port import free_port

pytestmark = pytest.mark.jobs

STEPS, SAVE_EVERY = 30, 4


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RestartResult:
    return train(tmp_path_factory.mktemp("uninterrupted"), steps=STEPS, save_every=SAVE_EVERY)


@pytest.fixture(scope="module")
def port() -> str:
    return str(free_port())


@pytest.fixture(scope="module", params=tiers([1, 2], quick=[1]), ids="kills={}".format)
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, port: str
) -> RestartResult:
    return train(
        tmp_path_factory.mktemp("killed"),
        steps=STEPS,
        save_every=SAVE_EVERY,
        kills=request.param,
        seed=3,
        launched=request.param == 2,
        ZEROWATCH_SERVE_PORT=port,
    )


def test_samples_and_weights_equal_those_of_an_uninterrupted_run(
    uninterrupted: RestartResult, killed: RestartResult
) -> None:
    assert (uninterrupted.code, killed.code) == (0, 0)
    for rank in (0, 1):
        assert list(killed.committed(rank)) == list(range(1, STEPS + 1))
        assert killed.committed(rank) == uninterrupted.committed(rank)
        (through,), (ended,) = uninterrupted.of(rank, "ended"), killed.of(rank, "ended")
        assert ended["weights"] == through["weights"]
        assert ended["samples"] == through["samples"] == 8 * STEPS


def test_each_attempt_resumes_from_the_last_checkpoint(killed: RestartResult) -> None:
    resumed = killed.of(0, "resumed")

    assert [event["attempt"] for event in resumed] == list(range(len(killed.kills) + 1))
    for kill, event in zip(killed.kills, resumed[1:], strict=True):
        assert event["step"] % SAVE_EVERY == 0
        assert kill.step is not None
        assert kill.step - SAVE_EVERY <= event["step"] <= kill.step + 1


def test_run_id_log_and_ports_stay_the_same(killed: RestartResult) -> None:
    for rank in (0, 1):
        events = killed.of(rank, "resumed")
        # None on rank 1 until it has read the id of rank 0.
        found = {event["run_id"] for event in events} - {None}
        assert found <= {killed.of(0, "resumed")[0]["run_id"]}
        assert len({event["address"] for event in events}) == 1
    for steps in steps_logged(killed.folder).values():
        assert set(steps) == set(range(1, STEPS + 1))
    (log,) = killed.folder.glob("runs/*/rank-0.jsonl")
    attempts = {json.loads(line)["attempt"] for line in log.read_text().splitlines() if line}
    assert attempts == set(range(len(killed.kills) + 1))


@pytest.mark.slow
def test_kills_while_checkpoints_are_written_in_the_background_change_nothing(
    tmp_path: Path, uninterrupted: RestartResult
) -> None:
    in_background = {"ZEROWATCH_CHECKPOINT_BACKGROUND": "true"}
    killed = train(
        tmp_path, steps=STEPS, save_every=1, kills=8, seed=5, launched=False, **in_background
    )

    assert killed.code == 0
    for kill, event in zip(killed.kills, killed.of(0, "resumed")[1:], strict=True):
        assert kill.step is not None
        assert kill.step - 2 <= event["step"] <= kill.step + 1  # the last save may be incomplete
    for rank in (0, 1):
        assert killed.committed(rank) == uninterrupted.committed(rank)
        (through,), (ended,) = uninterrupted.of(rank, "ended"), killed.of(rank, "ended")
        assert ended["weights"] == through["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("launched", [False, True], ids=["forked", "launched"])
def test_after_a_fatal_out_of_memory_error_micro_batches_are_smaller(
    tmp_path: Path, uninterrupted: RestartResult, launched: bool
) -> None:
    course = train(tmp_path, steps=9, save_every=2, full_after=5, launched=launched)

    assert course.code == 0
    (plan,) = tmp_path.glob("runs/*/plan.json")
    assert json.loads(plan.read_text())["plan"]["sizing"]["failing"]
    assert [event["step"] for event in course.of(1, "resumed")] == [0, 4]
    for rank in (0, 1):
        first = {event["step"]: event for event in course.of(rank, "committed")}
        assert list(first) == list(range(1, 10))
        for step, event in first.items():
            assert event["micro_batches"] == ([2, 2] if step <= 4 else [1, 1, 1, 1])
            assert event["replays"] == 0
            assert event["ids"] == uninterrupted.committed(rank)[step]["ids"]
