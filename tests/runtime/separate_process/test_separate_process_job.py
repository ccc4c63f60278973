"""Real jobs whose ranks are monitored by processes of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from chosen_cases import chosen, tiers
from fakes.scraper import eventually
from scripts.forked_ranks import running_ranks, start_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS

from zerowatch.runtime.monitor.step_ring import recover

pytestmark = pytest.mark.jobs

SEPARATE = {"ZEROWATCH_PROCESS_SEPARATE": "true"}
CONFIGURATIONS = ("stage 0", "stage 1", "stage 2", "stage 3", "stage 3, optimizer on cpu")
QUICK = ("stage 3, optimizer on cpu",)
each_configuration = pytest.mark.parametrize("name", tiers(CONFIGURATIONS, QUICK))


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    names, folder = chosen(request, "name"), tmp_path_factory.mktemp("compared")
    script = SCRIPTS / "monitor" / "compare_monitored.py"
    variables = {"TORCH_FR_BUFFER_SIZE": "100000", **SEPARATE}

    finished = start_ranks(2, script, folder, *names, cwd=folder, variables=variables)

    assert finished.returncode == 0, finished.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@each_configuration
def test_weights_are_bitwise_equal_and_calls_are_those_of_the_flight_recorder(compared, name):
    for rank in compared:
        assert "monitoring_process" in rank[name]["cost_parts"]
        assert rank[name]["trained"]
        assert rank[name]["bitwise_equal"]
        assert rank[name]["our_calls"] == rank[name]["flight_calls"]
        assert rank[name]["our_bytes"] == rank[name]["flight_bytes"]
        assert rank[name]["coverage"] == [1.0] * 4  # a listener in the training process


def logged_steps(log: Path) -> list[int]:
    lines = log.read_text().split("\n")[:-1]  # without one that is being written
    return [json.loads(line)["step"] for line in lines]


def test_the_log_of_a_killed_rank_is_completed_at_once(tmp_path: Path) -> None:
    script = SCRIPTS / "monitor" / "train_until_killed.py"
    logs = [tmp_path / "runs" / "killed" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    variables = {"ZEROWATCH_RUN_ID": "killed", **SEPARATE}
    with running_ranks(2, "-m", "zerowatch", script, cwd=tmp_path, variables=variables) as ranks:
        trains = eventually(
            lambda: (
                (logs[1].exists() and len(logged_steps(logs[1])) >= 20)
                or ranks.codes() != [None, None]
            ),
            TIMEOUT_SECONDS,
        )
        assert trains, "the job has logged no 20 steps"
        assert ranks.codes() == [None, None], ranks.output()

        os.kill(ranks.pids[1], signal.SIGKILL)
        ranks.join()

    def is_complete() -> bool:
        survivor, killed = (logged_steps(log) for log in logs)
        return set(survivor) - set(killed) <= {max(survivor)}

    assert eventually(is_complete, TIMEOUT_SECONDS)
    killed = logged_steps(logs[1])
    assert killed == list(range(1, len(killed) + 1))


def test_steps_that_a_late_monitoring_process_has_received_are_left_to_it(tmp_path: Path) -> None:
    script = SCRIPTS / "monitor" / "train_until_killed.py"
    log = tmp_path / "runs" / "late" / "rank-0.jsonl"
    variables = {"ZEROWATCH_RUN_ID": "late", **SEPARATE}
    with running_ranks(1, "-m", "zerowatch", script, cwd=tmp_path, variables=variables) as ranks:
        trains = eventually(
            lambda: (log.exists() and len(logged_steps(log)) >= 20) or ranks.codes() != [None],
            TIMEOUT_SECONDS,
        )
        assert trains, "the job has logged no 20 steps"
        assert ranks.codes() == [None], ranks.output()
        (monitoring,) = psutil.Process(ranks.pids[0]).children()

        monitoring.suspend()
        try:
            os.kill(ranks.pids[0], signal.SIGKILL)
            ranks.join()
            appended = recover(tmp_path / "runs", Path("/dev/shm"))
        finally:
            monitoring.resume()

    monitoring.wait(TIMEOUT_SECONDS)
    assert appended == 0
    steps = logged_steps(log)
    assert steps == sorted(set(steps))


def test_training_goes_on_if_its_monitoring_process_is_killed_and_the_ring_keeps_its_steps(
    tmp_path: Path,
) -> None:
    results = []
    for name, variables in (("with", SEPARATE), ("without", {})):
        folder = tmp_path / name
        folder.mkdir()
        script = SCRIPTS / "separate_process" / "lose_the_process.py"

        finished = start_ranks(1, script, folder, cwd=folder, variables=variables)

        assert finished.returncode == 0, finished.stderr
        results.append(json.loads((folder / "result.json").read_text()))
        says = "the monitoring process of rank 0 was killed (by SIGKILL: by hand, or by the kernel"
        assert finished.stderr.count(says) == (name == "with")
    assert results[0] == results[1]
    [run] = (tmp_path / "with" / "runs").iterdir()
    recover(run, Path("/dev/shm"))
    assert logged_steps(run / "rank-0.jsonl") == list(range(1, 21))


def test_without_another_process_a_rank_is_monitored_in_its_own(tmp_path: Path) -> None:
    script = SCRIPTS / "separate_process" / "lose_the_process.py"
    variables = {"NO_PROCESS": "yes", **SEPARATE}

    finished = start_ranks(1, script, tmp_path, cwd=tmp_path, variables=variables)

    assert finished.returncode == 0, finished.stderr
    assert "process.separate is not used, as another process cannot be started" in finished.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert logged_steps(run / "rank-0.jsonl") == list(range(1, 21))


def test_a_training_run_is_monitored_in_its_own_process(tmp_path: Path) -> None:
    script = SCRIPTS / "separate_process" / "training_run.py"

    finished = start_ranks(1, script, cwd=tmp_path, variables=SEPARATE)

    assert finished.returncode == 0, finished.stderr
    assert "process.separate is not used with a TrainingRun" in finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == {"steps": 3.0, "separate": False}
