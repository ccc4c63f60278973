"""Communication times of real ranks against PyTorch's profiler and other measurements.

The seconds of two real ranks against PyTorch's profiler and against a script's own stopwatch; the
bytes against what a network interface counted.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

CASES = (
    "waited_for_at_once",
    "waited_for_halfway",
    "waited_for_when_done",
    "hidden_behind_matmul",
    "two_waited_for_in_the_other_order",
    "waited_for_in_the_next_step",
    "never_waited_for",
    "synchronous",
)
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "reduce",
    "all_to_all_single",
)


@pytest.fixture(scope="module")
def figures(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kineto")
    script, stages = SCRIPTS / "collectives" / "kineto_checks.py", chosen(request, "stage")

    finished = start_ranks(2, script, folder, *stages, cwd=folder)

    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


@pytest.fixture(scope="module")
def bytes_sent(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("wire")

    script, file = SCRIPTS / "collectives" / "wire_bytes.py", folder / "figures.json"
    finished = start_ranks(1, script, file, *chosen(request, "ranks"), cwd=folder)

    if "no private network" in finished.stderr:
        pytest.skip(finished.stderr.strip())
    assert finished.returncode == 0, finished.stderr
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "figures.json").read_text())
    return found


@pytest.mark.parametrize("stage", tiers(["0", "1", "2", "3"], quick=["3"]))
def test_comm_seconds_agree_with_the_profiler(stage: str, figures: dict[str, Any]) -> None:
    all_steps = figures["stages"][stage]
    # Where a thread waits for a core, that may be in ours alone: take the quieter half.
    steps = sorted(all_steps, key=lambda step: step["delay"])[:20]

    assert len(all_steps) == 40
    assert all(step["calls"] == step["our_calls"] > 0 for step in all_steps)
    assert statistics.median(step["step"] for step in steps) >= 0.030
    off = statistics.median(abs(step["ours"] - step["kineto"]) for step in steps)
    off -= statistics.median(step["delay"] for step in steps)
    kineto = statistics.median(step["kineto"] for step in steps)
    calls = steps[-1]["calls"]  # we see what the host spends on a call besides, copies for one
    assert off <= max(0.03 * kineto, 0.001 * calls), (off, kineto, calls)


@pytest.mark.parametrize("case", CASES)
def test_exposed_and_overlapped_agree_with_a_stopwatch(case: str, figures: dict[str, Any]) -> None:
    found = figures["blocked"][case]

    tolerance = 0.03 * found["script_comm"]
    overlapped = found["comm"] - found["exposed"]
    script_overlapped = found["script_comm"] - found["script_exposed"]
    assert found["script_comm"] >= 0.100
    assert abs(found["exposed"] - found["script_exposed"]) <= tolerance, found
    assert abs(overlapped - script_overlapped) <= tolerance, found


@pytest.mark.parametrize("ranks", tiers(["2", "4"], quick=["2"]))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_wire_bytes_agree_with_the_interfaces_counter(
    operation: str, ranks: str, bytes_sent: dict[str, dict[str, list[float]]]
) -> None:
    ours, counted = bytes_sent[ranks][operation]

    assert counted == pytest.approx(ours, rel=0.01)
