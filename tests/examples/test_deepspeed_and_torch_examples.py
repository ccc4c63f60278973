"""The examples of DDP, FSDP2, pipelines, AutoTP and generation, on two ranks with gloo.

Each runs without monitoring and with it: the output, and so the weights, are the same. Covers
`torch_engine.py`, `torch_hooks.py`, `unseen_calls.py` and `functional_collectives.py` on process
groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from scripts.forked_ranks import start_ranks

from zerowatch.metrics.catalog.training import STEPS as STEPS_TOTAL
from zerowatch.metrics.catalog.training import TOKENS as TOKENS_TOTAL
from zerowatch.runtime.reports.metrics_reader import read_metrics
from zerowatch.runtime.reports.run_summary import summary_of

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12
PARAMETERS = 132_992  # of the language model of torch_ddp.py and torch_fsdp2.py
FLOAT = 4


@dataclass(frozen=True)
class Run:
    """The records of rank 0 in a monitored run of an example, and what differs from a plain run."""

    records: list[dict[str, Any]]
    output: list[str]
    plain_output: list[str]
    folder: Path

    def printed(self, name: str) -> dict[int, float]:
        """The values that the script printed under a name, by step."""
        found = (re.match(rf"step (\d+): {name} (\S+)$", line) for line in self.output)
        return {int(match[1]): float(match[2]) for match in found if match}

    def assert_metrics(self) -> None:
        """The metrics log of each rank has the steps, and as many tokens as the run log."""
        metrics = read_metrics(self.folder, frozenset())
        assert sorted(metrics.ranks) == [0, 1]
        assert {m.total(STEPS_TOTAL.name) for m in metrics.ranks.values()} == {len(self.records)}
        tokens = sum(record["tokens"] for record in self.records)
        assert metrics.ranks[0].total(TOKENS_TOTAL.name) == tokens


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith(("step ", "weights")))


def run(
    name: str,
    folder: Path,
    *options: str,
    watches_itself: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Run an example without and with monitoring.

    `options` belong to the plain run, and environment variables to the monitored one.
    """
    script, steps = EXAMPLES / name, ("--steps", str(STEPS))
    plain = start_ranks(2, script, *steps, *options, cwd=folder)
    assert plain.returncode == 0, plain.stderr
    attached = () if watches_itself else ("-m", "zerowatch")
    monitored = start_ranks(2, *attached, script, *steps, cwd=folder, variables=variables)
    assert monitored.returncode == 0, monitored.stderr
    assert "Traceback" not in monitored.stderr
    (log,) = (folder / "runs").glob("*/rank-0.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return Run(records, lines(monitored.stdout), lines(plain.stdout), log.parent)


def test_ddp_is_monitored_without_a_change_of_the_script(tmp_path: Path) -> None:
    found = run("torch_ddp.py", tmp_path)

    assert found.output == found.plain_output
    assert [record["step"] for record in found.records] == list(range(2, STEPS + 1))
    *_, last = found.records
    assert last["micro_batches"] == 2
    assert last["samples"] == 2 * 4
    assert last["tokens"] == 2 * 4 * 32
    # DDP all-reduces each gradient once in a step, in C++: counted, and not timed.
    (all_reduce,) = last["collectives"].values()
    assert all_reduce["payload_bytes"] == PARAMETERS * FLOAT
    assert all_reduce["seconds"] is None
    assert last["comm_exposed_seconds"] is None
    assert {"data", "forward", "backward", "optimizer"} <= last["phase_seconds"].keys()
    found.assert_metrics()
    losses = {record["step"]: record["loss"] for record in found.records}
    assert found.printed("loss") == {10: pytest.approx(losses[10], rel=1e-4)}


@pytest.mark.slow
def test_fsdp2_is_monitored_by_one_line(tmp_path: Path) -> None:
    found = run("torch_fsdp2.py", tmp_path, "--no-watch", watches_itself=True)

    assert found.output == found.plain_output
    assert [record["step"] for record in found.records] == list(range(1, STEPS + 1))
    *_, last = found.records
    collectives = last["collectives"]
    assert collectives["reduce_scatter"]["payload_bytes"] == PARAMETERS * FLOAT
    assert collectives["reduce_scatter"]["seconds"] > 0
    # Forward gathers all parameters, backward those of the two layers.
    assert collectives["all_gather"]["calls"] == 5
    # Gradient clipping all-reduces the squared norm of each parameter by a functional collective.
    assert collectives["all_reduce"]["calls"] == 1
    assert collectives["all_reduce"]["seconds"] > 0
    assert last["comm_exposed_seconds"] > 0


@pytest.mark.slow
def test_fsdp2_is_monitored_without_a_change_of_the_script(tmp_path: Path) -> None:
    script = EXAMPLES / "torch_fsdp2.py"

    done = start_ranks(
        2, "-m", "zerowatch", script, "--no-watch", "--steps", str(STEPS), cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "runs").glob("*/rank-0.jsonl")
    assert len(log.read_text().splitlines()) == STEPS - 1


# The pipeline runs in the quick tests, too: messages have groups that no other engine has.
@pytest.mark.parametrize("separate", [False, True], ids=["in process", "process.separate"])
@pytest.mark.parametrize(
    ("name", "op", "phase", "samples", "length", "throughput"),
    [
        # Both stages work on the same samples, and only the first one sees the tokens.
        ("deepspeed_pipeline.py", "send", "forward", 16, 32, {"tokens_per_second"}),
        # Both slices of the model are fed the same samples.
        pytest.param(
            "deepspeed_auto_tp.py", "all_reduce", "forward", 8, 32, set(), marks=pytest.mark.slow
        ),
        pytest.param(
            "hybrid_engine_rl.py", "all_reduce", "generate", 8, 16,
            {"samples_per_second", "tokens_per_second"}, marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_an_example_with_deepspeed_is_monitored_without_a_change_of_the_script(
    tmp_path: Path,
    name: str,
    op: str,
    phase: str,
    samples: int,
    length: int,
    throughput: set[str],
    separate: bool,
) -> None:
    found = run(name, tmp_path, variables={"ZEROWATCH_PROCESS_SEPARATE": str(separate)})

    assert found.output == found.plain_output
    assert [record["step"] for record in found.records] == list(range(1, STEPS + 1))
    *_, last = found.records
    assert last["collectives"][op]["calls"] > 0
    assert last["phase_seconds"][phase] > 0
    assert last["comm_exposed_seconds"] is not None
    assert (last["samples"], last["tokens"]) == (samples, samples * length)
    found.assert_metrics()
    if name == "deepspeed_pipeline.py":  # the others print the loss of one micro-batch, or none
        losses = {record["step"]: record["loss"] for record in found.records}
        assert found.printed("loss") == {10: pytest.approx(losses[10], rel=1e-5)}
    figures = summary_of(found.folder).figures
    known = {name for name in ("samples_per_second", "tokens_per_second") if figures[name]}
    assert known == throughput
