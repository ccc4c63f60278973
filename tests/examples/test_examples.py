"""The examples train on two ranks: the same weights with and without monitoring, right figures."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from package_tree import ROOT
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

from zerowatch.metrics.catalog.communication import COMM_EXPOSED_SECONDS
from zerowatch.metrics.catalog.training import STEPS
from zerowatch.metrics.catalog.training import TOKENS as TOKENS_TOTAL
from zerowatch.runtime.reports.metrics_reader import read_metrics

for library in ("lightning", "mlflow", "tensorboard", "wandb"):
    pytest.importorskip(library, reason="needs the extra integrations")
from tensorboard.backend.event_processing.event_accumulator import (  # noqa: E402
    EventAccumulator,
)
from wandb_files import rows  # noqa: E402

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

EXAMPLES = ROOT / "examples"
MONITORED = ("-m", "zerowatch")
# Each example makes micro-batches of 4 sequences of 32 tokens, two per step.
SAMPLES, TOKENS = 8, 8 * 32


@dataclass(frozen=True, slots=True)
class Trained:
    """What an example printed, and the folder of its run."""

    losses: list[float]
    weights: str
    folder: Path

    def records(self, rank: int) -> list[dict[str, Any]]:
        (run,) = (self.folder / "runs").iterdir()
        lines = (run / f"rank-{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def train(
    folder: Path,
    example: str,
    *arguments: str,
    by: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Trained:
    folder.mkdir()
    job = (*by, SCRIPTS / "run_example.py", EXAMPLES / example, *arguments)
    # Lightning recognizes torchrun by this variable.
    by_torchrun = {"TORCHELASTIC_RUN_ID": "examples"}
    done = start_ranks(2, *job, cwd=folder, variables={**by_torchrun, **(variables or {})})
    assert done.returncode == 0, done.stderr
    (losses,) = re.findall(r"^losses: (.*)$", done.stdout, re.MULTILINE)
    (weights,) = re.findall(r"^weights: (\w+)$", done.stdout, re.MULTILINE)
    return Trained([float(loss) for loss in losses.split()], weights, folder)


@pytest.mark.parametrize(
    ("example", "callback"),
    [
        ("huggingface_trainer.py", "--callback"),
        ("accelerate_loop.py", "--tracker"),
        ("lightning_deepspeed.py", "--callback"),
    ],
)
def test_weights_are_the_same_and_figures_are_right_in_each_way(
    tmp_path: Path, example: str, callback: str
) -> None:
    plain = train(tmp_path / "plain", example)
    assert not (plain.folder / "runs").exists()

    zero_code = train(tmp_path / "zero_code", example, by=MONITORED)
    by_callback = train(tmp_path / "callback", example, callback)
    both = train(tmp_path / "both", example, callback, by=MONITORED)

    assert {run.weights for run in (plain, zero_code, by_callback, both)} == {plain.weights}
    for run in (zero_code, by_callback, both):
        if "huggingface" in example:  # after step 10, with the bare model
            evaluated = [each["step"] for each in run.records(0) if "eval" in each["phase_seconds"]]
            assert evaluated == [11]
        assert_figures(run, plain.losses, is_mean_over_ranks="huggingface" in example)
    assert_logged(by_callback, plain.losses)


def test_the_trainers_figures_without_deepspeed_are_right(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "huggingface_trainer.py", "--ddp")

    run = train(tmp_path / "run", "huggingface_trainer.py", "--ddp", by=MONITORED)

    assert run.weights == plain.weights
    first, second = run.records(0), run.records(1)  # from the second step on
    losses = [(one["loss"] + two["loss"]) / 2 for one, two in zip(first, second, strict=True)]
    assert losses == pytest.approx(plain.losses[1:], rel=1e-5)
    assert {record["samples"] for record in (*first, *second)} == {SAMPLES}


def assert_figures(run: Trained, losses: list[float], *, is_mean_over_ranks: bool) -> None:
    first, second = run.records(0), run.records(1)
    steps = list(range(1, len(losses) + 1))
    for records in (first, second):
        assert [record["step"] for record in records] == steps
        assert {record["samples"] for record in records} == {SAMPLES}
        assert {record["tokens"] for record in records} == {TOKENS}
    recorded = [
        (one["loss"] + other["loss"]) / 2 if is_mean_over_ranks else one["loss"]
        for one, other in zip(first, second, strict=True)
    ]
    assert recorded == pytest.approx(losses, rel=1e-5)
    # The two ranks are fed different data.
    assert [one["loss"] for one in first] != [other["loss"] for other in second]
    (folder,) = (run.folder / "runs").iterdir()
    metrics = read_metrics(folder, frozenset()).ranks[0]
    assert metrics.total(STEPS.name) == len(losses)
    assert metrics.total(TOKENS_TOTAL.name) == sum(record["tokens"] for record in first)
    assert (metrics.total(COMM_EXPOSED_SECONDS.name) or 0) > 0


def assert_logged(run: Trained, losses: list[float]) -> None:
    (file,) = run.folder.glob("runs/*/logged.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["step"] for line in lines} - {None} <= set(range(1, len(losses) + 1))
    assert any("loss" in name for line in lines for name in line["values"])


TRACKERS = {
    "ZEROWATCH_SINKS_NAMES": "tensorboard,wandb,mlflow",
    "ZEROWATCH_SINKS_INTERVAL_SECONDS": "0",
    "ZEROWATCH_SINKS_TIMEOUT_SECONDS": "500",  # a busy machine imports the libraries slowly
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_TRACKING_URI": "mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


OWN = ("ZEROWATCH_SINKS_NAMES", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE")


def test_each_tracker_has_the_values_of_the_run_log_and_of_the_metrics(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "experiment_trackers.py")

    run = train(tmp_path / "run", "experiment_trackers.py", by=MONITORED, variables=TRACKERS)

    assert run.weights == plain.weights
    records = run.records(0)
    logged = {record["step"]: record["loss"] for record in records}
    assert list(logged.values()) == pytest.approx(plain.losses, rel=1e-5)
    (folder,) = (run.folder / "runs").iterdir()
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert losses_of(events, "zerowatch/loss") == pytest.approx(logged, rel=1e-6)
    assert events.Scalars("zerowatch/metrics/steps_total")[-1].value == len(logged)
    found = [row for _, row in rows(run.folder / "wandb")]
    written = [row for row in found if "zerowatch/loss" in row]
    assert {row["zerowatch/step"]: row["zerowatch/loss"] for row in written} == logged
    assert {row["zerowatch/tokens"] for row in written} == {TOKENS}
    assert found[-1]["zerowatch/metrics/steps_total"] == len(logged)
    (history,) = (run.folder / "mlruns").rglob("metrics/zerowatch/loss")
    lines = [line.split() for line in history.read_text().splitlines()]
    assert {int(step): float(loss) for _, loss, step in lines} == logged


def losses_of(events: EventAccumulator, name: str) -> dict[int, float]:
    return {each.step: each.value for each in events.Scalars(name)}


def test_the_monitors_of_the_ds_config_get_the_values_beside_deepspeeds_own(tmp_path: Path) -> None:
    arguments = ("--deepspeed-monitor", "tensorboard", "csv_monitor", "wandb")
    variables = {name: value for name, value in TRACKERS.items() if name not in OWN}
    off = {**variables, "ZEROWATCH_ENABLED": "false"}
    plain = train(tmp_path / "plain", "experiment_trackers.py", *arguments, variables=off)

    run = train(
        tmp_path / "run",
        "experiment_trackers.py",
        *arguments,
        by=MONITORED,
        variables=variables,
    )

    assert run.weights == plain.weights
    # DeepSpeed counts the samples of both ranks.
    logged = {2 * SAMPLES * record["step"]: record["loss"] for record in run.records(0)}
    before, after = (
        EventAccumulator(str(each.folder / "logs" / "tensorboard")).Reload()
        for each in (plain, run)
    )
    assert losses_of(after, "zerowatch/loss") == pytest.approx(logged, rel=1e-6)
    lr = "Train/Samples/lr"
    assert losses_of(after, lr) == losses_of(before, lr) != {}
    with (run.folder / "logs" / "csv" / "zerowatch_loss.csv").open() as stream:
        header, *lines = csv.reader(stream)
    assert header == ["step", "loss"]
    assert {int(samples): float(loss) for samples, loss in lines} == logged
    script, joined = (
        {step: row[lr] for step, row in rows(each.folder / "wandb") if lr in row}
        for each in (plain, run)
    )
    assert joined == script  # no row of the script is lost
    written = [
        row["zerowatch/loss"] for _, row in rows(run.folder / "wandb") if "zerowatch/loss" in row
    ]
    assert written[-1] == run.records(0)[-1]["loss"]
