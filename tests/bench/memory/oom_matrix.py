"""Runs out of memory in every known way, on 2 ranks and on 1, and prints the outcomes.

.venv/bin/python tests/bench/memory/oom_matrix.py [--ranks N] [ENGINE...]

Of each engine: faults in forward and backward, of the first and the last block, in the first,
second and third micro-batch, on one rank and on all, raised and real. A window passes if the run
replays it in the size that fits, and if weights and losses are bitwise those of a run that used
that size, with every sample once. Takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS / "support" / "scripts" / "trainer" / "recovery_matrix.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")
TIMEOUT_SECONDS = 7200
HEADINGS = (
    "ranks",
    "engine",
    "faults",
    "recovered",
    "weights bitwise",
    "losses bitwise",
    "samples once",
    "votes",
    "ms a vote",
    "seconds",
)

Report = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what out-of-memory errors leave behind.")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="by default both")
    parser.add_argument("engines", nargs="*", help="by default all")
    asked = parser.parse_args()
    rows = [
        row
        for world_size in ([asked.ranks] if asked.ranks else [2, 1])
        for row in rows_of(world_size, run(world_size, asked.engines))
    ]
    print(render([HEADINGS, *rows]))
    missed = [row for row in rows if "NO" in row or row[2] != row[3]]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} engines passed.")
    sys.exit(1 if missed else 0)


def run(world_size: int, engines: list[str]) -> list[Report]:
    """Run the matrix; return each rank's report."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-oom-") as name:
        command = [TORCHRUN, "--standalone", "--nproc-per-node", world_size]
        command += [SCRIPT, name, "all", *engines]
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=name,
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        files = [Path(name, f"rank-{rank}.json") for rank in range(world_size)]
        if not all(file.exists() for file in files):
            sys.exit(f"the job ended with {done.returncode}:\n{done.stderr[-5000:]}")
        return [json.loads(file.read_text()) for file in files]


def rows_of(world_size: int, ranks: list[Report]) -> list[tuple[str, ...]]:
    return [row_of(world_size, name, [rank[name] for rank in ranks]) for name in ranks[0]]


def row_of(world_size: int, name: str, ranks: list[dict[str, Any]]) -> tuple[str, ...]:
    first = ranks[0]
    recovered = sum(
        all(recovers(rank["windows"][number]) for rank in ranks)
        for number in range(len(first["windows"]))
    )
    votes = first["votes"]
    return (
        str(world_size),
        name,
        str(len(first["windows"])),
        str(recovered),
        verdict(all(rank["same weights"] for rank in ranks)),
        verdict(all(all(rank["same losses"]) for rank in ranks)),
        verdict(all(rank["samples once"] for rank in ranks)),
        str(votes),
        f"{1e3 * first['vote_seconds'] / votes:.2f}" if votes else "",
        f"{first['seconds']:.0f}",
    )


def recovers(window: dict[str, Any]) -> bool:
    """Whether a window was replayed in the expected size, which the next one kept."""
    sizes = {max(window["sizes"]), max(window["then"]), window["expected"]}
    return window["replays"] >= 1 and len(sizes) == 1


def verdict(passed: bool) -> str:
    return "yes" if passed else "NO"


def render(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
