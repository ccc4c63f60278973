"""Test of a run that suffers every kind of fault: `make bench ARGS="--quick chaos"`."""

from __future__ import annotations

import pytest
from bench.bench_options import Options
from bench.chaos import chaos
from bench.chaos.chaos_run import missing
from bench.rank_processes import PYTHONPATH

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]


def test_a_run_with_every_kind_of_fault_trains_as_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    rows = list(chaos.bench(Options(steps=0, quick=True)))

    assert [row.cells for row in rows if row.met is False] == []
    assert sum(bool(row.goal) for row in rows) > len(chaos.planned.LASTS)
