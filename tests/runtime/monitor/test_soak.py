"""A long run of tiny steps: monitoring leaks no memory, and its number of series stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bench.rank_processes import run_ranks

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

# The bench `soak` takes 10,000 steps on two ranks, which may grow by 5 MiB over the 8,500 after the
# first; this is what fits into a minute of CI, with the same growth a step. It starts to count when
# the ring of the last calls (collectives/groups.py, some 2.5 MiB) is full.
STEPS = 8000
FIRST_STEPS = 4000
ALLOWED_GROWTH_BYTES = 5 * 2**20 * (STEPS - FIRST_STEPS) // 8500
SERIES_ON_RANK_0 = 400


@pytest.fixture(scope="module")
def soaks() -> dict[str, dict[str, Any]]:
    """Memory of an unmonitored and a monitored run, in parallel, each on one rank."""
    with ThreadPoolExecutor() as pool:
        running = {
            name: pool.submit(_soak, watched=name == "watched") for name in ("unwatched", "watched")
        }
        return {name: run.result() for name, run in running.items()}


def _soak(*, watched: bool) -> dict[str, Any]:
    steps = {"steps": STEPS, "first_steps": FIRST_STEPS, "first_seconds": 0}
    asked = {"stage": 1, **steps, "watched": watched, "separate": False}
    return run_ranks("monitoring_cost/soak_job.py", asked, world_size=1, timeout_seconds=600)[0]


def _grown_bytes(soak: dict[str, Any]) -> int:
    grown: int = soak["late"]["resident_bytes"] - soak["early"]["resident_bytes"]
    return grown


def test_a_watched_run_grows_no_faster_than_5_mib_in_10_000_steps_beyond_an_unwatched_one(
    soaks: dict[str, dict[str, Any]],
) -> None:
    unwatched, watched = (_grown_bytes(soaks[name]) for name in ("unwatched", "watched"))

    assert watched <= unwatched + ALLOWED_GROWTH_BYTES


def test_the_series_of_a_run_stay_within_the_budget_and_do_not_change(
    soaks: dict[str, dict[str, Any]],
) -> None:
    early, late = (set(soaks["watched"][when]["series"]) for when in ("early", "late"))

    assert early == late
    assert 0 < len(late) <= SERIES_ON_RANK_0
