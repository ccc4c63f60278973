"""Tests of what the bench of instructions reads and shows: `bench/monitoring_cost`."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.bench_options import Options
from bench.monitoring_cost import training_thread_instructions
from bench.monitoring_cost.training_thread_instructions import read_profile

# `main` calls `step` three times, and `step` itself once; a line of `step` is from another file.
FILE = """\
# callgrind format
version: 1
creator: callgrind-3.19.0
part: 1
thread: 1

desc: D1 cache: 32768 B, 64 B, 8-way associative
desc: Trigger: Client Request: off

positions: line
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
summary: 128 30 9 4 6 2 2 3 1

ob=(1) /usr/lib/libpython.so
fl=(1) ceval.c
fn=(1) main
20 10 4 0 2 2 0 1
+3 2 0 1
cfi=(2) step.c
cfn=(2) step
calls=3 7
* 116 26 8 2 4 2 1 3 1
-4 2

fl=(2)
fn=(2)
7 100 20 8 2 4 2 1 3 1
fi=(1)
90 6 2
fe=(2)
cfn=(3) step'2
calls=1 7
+1 10 4

fn=(3)
7 8 4

totals: 128 30 9 4 6 2 2 3 1
"""


def test_counts_of_a_callee_count_once_and_recursions_for_one_function(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.1-01"
    file.write_text(FILE)

    profile = read_profile(file, times=2)

    assert profile.instructions == {"main": 7.0, "step": 57.0}
    assert profile.total(["Ir"]) == 64.0
    assert profile.total(["ILmr"]) == 1.0
    assert profile.total(["DLmr", "DLmw"]) == 2.0


def test_without_valgrind_the_bench_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(training_thread_instructions, "FOLDER", tmp_path / "profiles")

    (row,) = training_thread_instructions.bench(Options(steps=1, quick=True))

    assert "apt-get install valgrind" in row.measured
