"""Tests of the figures of the cross-rank exchange on a slow link and on a fast link."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.two_hosts import missing, run_on_both, two_hosts
from scripts.launching import SCRIPTS, environment

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

REASON = missing()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=REASON or "")
RATE_MBIT = 200
# Of what the link carries: 1514 bytes on the wire for 1448 of a full TCP segment's data.
DATA_SHARE = 1448 / 1514


def train(folder: Path, rate: str | None, *arguments: int) -> list[dict[str, Any]]:
    """Train on two hosts; return what each rank wrote."""
    variables = environment()
    del variables["GLOO_SOCKET_IFNAME"]
    command = (sys.executable, SCRIPTS / "cross_rank" / "link_job.py", folder, *arguments)
    with two_hosts(rate) as hosts:
        ended = run_on_both(hosts, command, variables, timeout_seconds=600)
    # By their reports, not by exit codes: torch 2.13's gloo now and then aborts as the interpreter
    # ends ("terminate called without an active exception"), unwatched too.
    reports = [folder / f"rank-{rank}.json" for rank in (0, 1)]
    assert all(report.exists() for report in reports), [one.stderr for one in ended]
    return [json.loads(report.read_text()) for report in reports]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    # 4 layers of 700 x 700: 7.8 MB of gradients a step, in buckets of 2 MB. The redundancy of the
    # first steps is not known: of four, and of those that end while the estimate is made.
    return train(tmp_path_factory.mktemp("slow"), f"{RATE_MBIT}mbit", 500_000, 700, 40)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("fast"), None, 2_000, 64, 300)


@needs_namespaces
def test_on_a_slow_link_bandwidth_is_the_largest_cause(slow):
    for rank in slow:
        cause = rank["cause"]

        assert max(cause, key=cause.get) == "bandwidth"
        # On a busy machine the ranks arrive at different times.
        transfer = sum(cause.values()) - cause["imbalance"]
        # A third of what ZeRO-2's all-reduce moves, a reduce-scatter would not have.
        assert cause["bandwidth"] + cause["redundancy"] > 0.8 * transfer
        assert cause["redundancy"] == pytest.approx(cause["bandwidth"] / 2, rel=0.3)


@needs_namespaces
def test_the_bus_bandwidth_of_a_slow_link_is_what_the_script_measures_and_the_link_allows(slow):
    for rank in slow:
        # Of what was read during the run: a lost packet makes an exchange slower now and then.
        read_mbit = rank["usual_bandwidth"] * 8 / 1e6

        # A busy machine does not use the whole link.
        assert read_mbit < 1.1 * RATE_MBIT * DATA_SHARE
        assert read_mbit == pytest.approx(rank["measured"]["bandwidth"] * 8 / 1e6, rel=0.15)


@needs_namespaces
def test_the_links_bandwidth_is_estimated_from_collectives_of_several_kinds_and_sizes(slow):
    for rank in slow:
        # gloo's all_gather gets less out of the link than its all_reduce.
        assert rank["link_bandwidth"]["dp"] == pytest.approx(rank["measured"]["bandwidth"], rel=0.3)


@needs_namespaces
def test_with_tiny_buckets_on_a_fast_link_latency_is_calls_times_base_latency(fast):
    for rank in fast:
        # Each call counts with the base latency of its time at most. That is a median of calls: of
        # a call that is faster only its own duration counts, so half of the calls have all of it.
        calls = sum(rank["calls"].values())
        low = 0.5 * calls * rank["known_ratio"] * min(rank["latencies"])
        assert low < rank["cause"]["latency"] < 1.1 * calls * max(rank["latencies"])
        assert rank["failures"].get("unmatched", 0) == 0


@needs_namespaces
def test_the_base_latency_is_about_what_the_script_measures_itself(fast):
    for rank in fast:
        # The script's figure is of the same calls, and of those before a latency was known.
        assert 0.4 < rank["usual_latency"] / rank["measured"]["latency"] < 2.5
