"""`zerowatch check` on two hosts: it measures the link between them, and names a slow one.

Covers `check/between_ranks.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.two_hosts import missing, run_on_both, two_hosts
from scripts.launching import environment

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]


def checked(tmp_path: Path, rate: str | None) -> tuple[int, dict[str, Any]]:
    """Run the check on two hosts; return rank 0's exit code and its finding about the link."""
    command = (sys.executable, "-m", "zerowatch.runtime.cli.check", "--json")
    variables = environment(
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"), ZEROWATCH_RUN_LOG_FOLDER=str(tmp_path)
    )
    del variables["GLOO_SOCKET_IFNAME"]
    with two_hosts(rate) as hosts:
        first, second = run_on_both(hosts, command, variables, timeout_seconds=300)
    assert second.stdout == ""
    findings = json.loads(first.stdout)["findings"]
    (link,) = [each for each in findings if each["check"] == "links"]
    return first.returncode, link


@pytest.mark.parametrize("mbit", [20, 400])
def test_a_slow_link_is_named_with_its_rate(tmp_path: Path, mbit: int) -> None:
    expected = pytest.approx(mbit * 0.956, rel=0.15)  # 1514 bytes on the wire carry 1448 of data
    rates = []
    for _ in range(5):  # a busy machine is slower now and then
        code, link = checked(tmp_path, f"{mbit}mbit")
        rates.append(link["figures"]["bytes_per_second"] * 8 / 1e6)
        assert code == 1
        assert link["verdict"] == "failed"
        assert "slow link, 10 Gb/s are recommended" in link["text"]
        if rates[-1] == expected:
            break

    assert rates[-1] == expected, rates


def test_a_fast_link_is_not_called_slow(tmp_path: Path) -> None:
    _, link = checked(tmp_path, None)

    assert "slow link" not in link["text"]
    assert link["figures"]["bytes_per_second"] > 1e9 / 8
