"""Phases on a GPU: the times of the compute stream, not of the host that runs ahead of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.rank_jobs import run_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORWARD, BACKWARD, LOADING = 0.020, 0.040, 0.100  # seconds, as in the job
WARM_UP, STEPS = 4, 12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (report,) = run_job("phases_job.py", tmp_path_factory.mktemp("phases"))
    return report


def test_phases_are_times_of_the_device(
    found: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    steps = found["phases"][WARM_UP:-1]
    forward, backward, data = (
        statistics.median(step.get(phase, 0.0) for step in steps)
        for phase in ("forward", "backward", "data")
    )

    record_property("seconds", {"forward": forward, "backward": backward, "data": data})
    record_property("host's forward", found["host forward"])
    assert found["failures"] == {}
    assert found["host forward"] < FORWARD / 2, "the host does not run ahead: this shows nothing"
    assert forward == pytest.approx(FORWARD, rel=0.03)
    assert backward == pytest.approx(BACKWARD, rel=0.03)
    last = found["script's last forward"]
    assert last > 0.97 * FORWARD
    assert found["phases"][-1]["forward"] == pytest.approx(last, rel=0.03)


def test_steps_add_up_to_what_the_script_measures_between_two_synchronizations(
    found: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    seconds, expected = found["seconds"], found["script's seconds"]
    steps, last = sum(seconds[WARM_UP:-1]), seconds[-1]

    record_property("seconds", {"steps": steps, "last": last})
    record_property("script's seconds", expected)
    assert len(seconds) == WARM_UP + STEPS + 1
    assert steps == pytest.approx(expected["steps"], rel=0.01)
    assert last == pytest.approx(expected["last"], rel=0.01)
    assert last > LOADING + FORWARD + BACKWARD


def test_busy_and_idle_seconds_of_the_gpu_are_counted(
    found: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    seconds = found["device seconds"]

    record_property("device seconds", seconds)
    assert seconds["cuda:0 busy"] + seconds["cuda:0 idle"] > 1.0
