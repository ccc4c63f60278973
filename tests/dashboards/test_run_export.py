"""A run that nobody scraped, exported: promtool reads it, and Prometheus fills the dashboards.

The metrics logs are written by the code that runs write them with; only their values are made up.
Covers `metrics/exporters/openmetrics_file.py`, `dashboards/run_export.py` and
`dashboards/panel_coverage.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from fakes.scraper import eventually
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
from recorded_metrics import STARTED, RecordedRank
from require import program
from servers.grafana_reader import Reader, dashboard_queries
from servers.prometheus_server import Prometheus

from zerowatch.dashboards.build import dashboard_files
from zerowatch.dashboards.cli import RENDERED, export
from zerowatch.dashboards.panel_coverage import empty_panels
from zerowatch.dashboards.prometheus_files import by_dependence, recording_rules
from zerowatch.dashboards.recording_rules import (
    CHECKPOINT_INTERVAL_HOURLY,
    LAST_CHECKPOINT_HOURLY,
)
from zerowatch.dashboards.run_export import export_openmetrics
from zerowatch.dashboards.timing import Timing
from zerowatch.errors import CommandLineError
from zerowatch.metrics.catalog import CATALOG, communication, training, tuner
from zerowatch.metrics.recorder import Recorder

RUN = "night-7"
RECORDS = 120  # half an hour
# What Prometheus writes about its own scrapes and alerts; nothing else can have written it.
OF_PROMETHEUS = ("ALERTS", "ALERTS_FOR_STATE", "scrape_duration_seconds", "scrape_samples_scraped")


def run_export(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(export, [str(folder), *options])


def families(folder: Path, *options: str) -> dict[str, Metric]:
    """The metrics of an export, read by prometheus_client's parser, which checks all rules."""
    output = folder / "out.om"
    assert run_export(folder, "--openmetrics", "--output", str(output), *options).exit_code == 0
    return {family.name: family for family in parse(output.read_text())}


def train(recorder: Recorder, draw: random.Random) -> None:
    """Give every metric of the catalog a value, for some of its labels."""
    for spec in CATALOG:
        known = {label.name: ("cuda:0", "cpu") for label in spec.labels if not label.values}
        for labels in spec.label_combinations(**known):
            if spec.kind == "histogram":
                recorder.observe(spec, draw.random(), *labels)
            elif spec.kind == "counter":
                recorder.add(spec, draw.random(), *labels)
            elif spec in (training.RUN_END_INFO, training.SHARED_WORK):
                continue  # the run goes on, and its ranks train on samples of their own
            elif spec.kind == "info":
                recorder.set_info(spec, *labels)
            else:
                recorder.set(spec, draw.random(), *labels)
    recorder.set(training.RUN_ACTIVE, 1)
    recorder.set(training.RUN_ATTEMPT, 0)
    recorder.set(training.RUN_START_TIMESTAMP, STARTED)
    recorder.set(training.LAST_CHECKPOINT_TIMESTAMP, time.time())
    recorder.set(communication.COMM_COVERAGE_RATIO, 1)  # else waits are not compared
    recorder.set(tuner.TUNER_STATE, 1, "trial")


def test_series_have_the_labels_of_their_target_and_values_with_timestamps(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder, rank=3, address="10.1.0.2:9465") as rank:
        rank.recorder.set(training.LOSS, 2.5)
        rank.recorder.add(training.PHASE_SECONDS, 4, "forward")
        rank.tick()
        rank.recorder.set(training.LOSS, math.nan)
        rank.tick()

    found = families(folder)
    target = {
        "job": "zerowatch",
        "instance": "10.1.0.2:9465",
        "run": RUN,
        "node": "here",
        "rank": "3",
    }
    samples = found["zerowatch_loss"].samples
    assert [float(sample.timestamp) - STARTED for sample in samples] == [0, 15, 30]
    assert samples[0].labels == target
    assert samples[0].value == 2.5
    assert math.isnan(samples[1].value)
    phases = found["zerowatch_phase_seconds"]
    assert (phases.type, phases.documentation) == ("counter", training.PHASE_SECONDS.help)
    assert phases.samples[0].labels == {**target, "phase": "forward"}
    assert [sample.value for sample in found["up"].samples] == [1, 1, 1]


def test_every_metric_of_the_catalog_is_valid_openmetrics(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder) as rank:  # one record: the parser loses parts of later ones
        train(rank.recorder, random.Random(seed))

    found = families(folder)
    names = {re.sub("_(total|info)$", "", spec.name) for spec in CATALOG}
    assert names - found.keys() == {"zerowatch_run_end", "zerowatch_shared_work"}
    assert "process_open_fds" in found


def test_a_label_of_the_target_replaces_the_same_label_of_a_series(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder) as rank:
        values = ["other" for _ in training.RUN_INFO.labels]
        rank.recorder.set_info(training.RUN_INFO, *values)
        rank.tick()

    [first, _] = families(folder)["zerowatch_run"].samples
    assert first.labels["run"] == RUN


def test_a_series_that_ended_has_no_samples_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder) as rank:
        for value in (1.0, None, 2.0, None):
            rank.recorder.remove(training.LOSS)
            if value is not None:
                rank.recorder.set(training.LOSS, value)
            rank.tick()

    samples = families(folder)["zerowatch_loss"].samples
    assert [(float(each.timestamp) - STARTED, each.value) for each in samples] == [(0, 1), (30, 2)]


def test_attempts_are_one_series_in_the_order_of_time(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    for attempt, begins_at in enumerate((0.0, 100.0, 40.0)):  # before the third, NTP set the clock
        with RecordedRank(folder, attempt=attempt, begins_at=begins_at) as rank:
            rank.recorder.add(training.STEPS, attempt + 1)
            rank.tick()

    samples = families(folder)["zerowatch_steps"].samples
    times = [float(sample.timestamp) - STARTED for sample in samples]
    assert times == [0, 15, 40, 55, 100, 115]
    assert [sample.value for sample in samples] == [1, 1, 3, 3, 2, 2]


def test_chosen_ranks_only_and_another_job(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    for rank in range(3):
        with RecordedRank(folder, rank) as one:
            one.tick()

    samples = families(folder, "--rank", "1", "--rank", "2", "--job", "night")["up"].samples
    assert {sample.labels["rank"] for sample in samples} == {"1", "2"}
    assert {sample.labels["job"] for sample in samples} == {"night"}


def test_the_text_goes_to_standard_output_and_notes_to_standard_error(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder) as rank:
        rank.tick()

    result = run_export(folder, "--openmetrics")
    assert result.exit_code == 0
    assert result.stdout.endswith("# EOF\n")
    assert "promtool tsdb create-blocks-from openmetrics FILE" in result.stderr


def test_a_run_without_metrics_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    output = tmp_path / "out.om"

    result = run_export(tmp_path / RUN, "--openmetrics", "--output", str(output))

    assert isinstance(result.exception, CommandLineError)
    assert "metrics log" in str(result.exception)
    assert not output.exists()
    assert list(tmp_path.iterdir()) == [tmp_path / RUN]


def test_a_rank_without_a_log_is_reported_with_the_ranks_that_have_one(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    for rank in (0, 1):
        with RecordedRank(folder, rank) as recorded:
            recorded.tick()
    output = tmp_path / "run.om"

    none = run_export(folder, "--openmetrics", "--output", str(output), "--rank", "7")
    some = run_export(
        folder, "--openmetrics", "--output", str(output), "--rank", "7", "--rank", "0"
    )

    assert isinstance(none.exception, CommandLineError)
    assert "no metrics log of rank 7; the run has logs of ranks 0, 1" in str(none.exception)
    assert "metrics_interval_seconds" not in str(none.exception)
    assert some.exit_code == 0
    assert re.search("^incomplete: .*rank 7; .*ranks 0, 1$", some.stdout, re.MULTILINE)


def test_a_format_must_be_named(tmp_path: Path) -> None:
    result = run_export(tmp_path)

    assert result.exit_code == 2
    assert "--openmetrics" in result.stderr


def test_a_damaged_log_is_exported_and_called_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    with RecordedRank(folder) as rank:
        rank.tick()
        rank.tick()
    rank.path.write_bytes(rank.path.read_bytes()[:-3])

    result = run_export(folder, "--openmetrics", "--output", str(tmp_path / "out.om"))
    assert result.exit_code == 0
    assert re.search(r"^incomplete: .*half written", result.stdout, re.MULTILINE)


def test_panels_that_the_series_cannot_fill_are_named_with_what_they_lack() -> None:
    panels = empty_panels(RENDERED / "grafana", [("zerowatch_loss", {"rank": "0"})])

    titles = {(panel.dashboard, panel.panel) for panel in panels}
    assert ("zerowatch / Overview", "Loss") not in titles
    assert ("zerowatch_mfu_ratio",) in {panel.missing for panel in panels}


@pytest.mark.parametrize(("rank", "is_filled"), [("0", True), ("1", False)])
def test_a_panel_of_rank_0_is_filled_by_its_series_only(rank: str, is_filled: bool) -> None:
    labels = {"job": "zerowatch", "run": RUN, "node": "a", "rank": rank}
    names = ("learning_rate", "last_checkpoint_timestamp_seconds", "loss", "run_active")
    series = [(f"zerowatch_{name}", labels) for name in names]
    series.append(("process_start_time_seconds", labels))

    empty = {panel.panel for panel in empty_panels(RENDERED / "grafana", series)}

    of_rank_0 = {"Learning rate (all ranks)", "Last checkpoint", "annotation Starts"}
    assert of_rank_0 & empty == (set() if is_filled else of_rank_0)
    assert "Loss" not in empty


def test_rules_for_old_data_are_split_by_what_they_read() -> None:
    rules = recording_rules(Timing(), {})
    files = by_dependence(rules)

    names = [{r["record"] for group in file["groups"] for r in group["rules"]} for file in files]
    assert sum(map(len, names)) == len({r["record"] for g in rules["groups"] for r in g["rules"]})
    for number, file in enumerate(files):
        later = set().union(*names[number:])
        for group in file["groups"]:
            for rule in group["rules"]:
                # A rule may read its own last value.
                others = later - {rule["record"]}
                assert others.isdisjoint(re.findall(r"[\w:]+", rule["expr"]))


@dataclass(frozen=True, slots=True)
class Backfilled:
    """A Prometheus on the blocks of an exported run, and what the export printed."""

    prometheus: Prometheus
    started: float
    printed: str


@pytest.fixture(scope="module")
def backfilled(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Iterator[Backfilled]:
    """Export a run, and run the commands that the export prints."""
    folder = tmp_path_factory.mktemp("export")
    started = time.time() - 6 * 3600
    draw = random.Random(seed)
    for number in (0, 1):
        address = f"127.0.0.1:{9464 + number}"
        with RecordedRank(folder / RUN, number, address=address, started=started) as rank:
            for _ in range(RECORDS):
                train(rank.recorder, draw)
                rank.tick()
            if number == 1:
                rank.recorder.set(training.RUN_ACTIVE, 0)
                rank.recorder.set_info(training.RUN_END_INFO, "completed")
    options = ("--openmetrics", "--output", str(folder / "run.om"))
    printed = run_export(folder / RUN, *options).stdout
    assert "--storage.tsdb.retention.time=10y --query.lookback-delta=60s" in printed
    commands = re.findall(r"^  promtool (.*)$", printed, re.MULTILINE)
    promtool(folder, commands[0])
    for command in commands[1:]:
        with serving(folder) as prometheus:
            promtool(folder, command.replace("127.0.0.1:9095", prometheus.address))
    with serving(folder) as prometheus:
        yield Backfilled(prometheus, started, printed)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Prometheus]:
    flags = ("--storage.tsdb.retention.time=10y", "--query.lookback-delta=60s")
    prometheus = Prometheus(folder, "", *flags)
    with contextlib.closing(prometheus):
        assert eventually(prometheus.is_ready, 300, pause=0.1), prometheus.log.read_text()
        yield prometheus


def promtool(folder: Path, arguments: str) -> None:
    command = [program("promtool", apt="prometheus"), *arguments.split()]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_prometheus_answers_the_queries_of_the_dashboards_from_the_export(
    backfilled: Backfilled,
) -> None:
    variables = {"job": ["zerowatch"], **{name: [RUN] for name in ("run", "run_a", "run_b")}}
    seconds = 15.0 * RECORDS
    reader = Reader(variables=variables, range_seconds=seconds)
    empty = {panel.panel for panel in empty_panels(RENDERED / "grafana", series(backfilled))}
    without, with_data = [], []
    for text in dashboard_files().values():
        dashboard = json.loads(text)
        for query in dashboard_queries(dashboard):
            answer = reader.ask(
                backfilled.prometheus, query, dashboard, backfilled.started + seconds
            )
            (with_data if answer else without).append((query.name, query.panel))

    assert [name for name, panel in without if panel not in empty] == []
    assert len(with_data) > 200


def series(backfilled: Backfilled) -> list[tuple[str, dict[str, Any]]]:
    found = backfilled.prometheus.ask(
        "series",
        **{"match[]": '{__name__!=""}', "start": backfilled.started, "end": time.time()},
    )
    return [(labels["__name__"], labels) for labels in found]


def test_only_what_prometheus_writes_about_itself_is_missing(backfilled: Backfilled) -> None:
    _, _, listed = backfilled.printed.partition("is missing in these panels")
    missing = {
        name for line in listed.splitlines()[1:] for name in line.rpartition(": ")[2].split(", ")
    }

    assert missing == set(OF_PROMETHEUS)


def test_every_recorded_series_is_there(backfilled: Backfilled) -> None:
    rules = yaml.safe_load((RENDERED / "prometheus" / "recording.yaml").read_text())
    names = {name for name, _ in series(backfilled)}

    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    # The run may be over before an hour begins.
    hourly = {LAST_CHECKPOINT_HOURLY.name, CHECKPOINT_INTERVAL_HOURLY.name}
    assert recorded - names - hourly == set()


def test_the_commands_and_the_panels_without_data_are_printed(tmp_path: Path) -> None:
    folder, output, rendered = tmp_path / RUN, tmp_path / "my run.om", tmp_path / "rendered"
    with RecordedRank(folder, 1) as rank:
        rank.recorder.set(training.LOSS, 2.5)
        rank.tick()
        rank.tick()
    queries = {
        "Loss": ("zerowatch_loss",),
        "Both": ("zerowatch_loss", "zerowatch_mfu_ratio"),
        "Neither": ("zerowatch_tokens_total", "zerowatch_mfu_ratio"),
    }
    page = {
        "title": "Page",
        "panels": [
            {"title": title, "targets": [{"expr": each} for each in expressions]}
            for title, expressions in queries.items()
        ],
        "annotations": {"list": []},
    }
    (rendered / "grafana").mkdir(parents=True)
    (rendered / "grafana" / "page.json").write_text(json.dumps(page))
    (rendered / "backfill").mkdir()
    for number in (2, 1):
        (rendered / "backfill" / f"recording-{number}.yaml").touch()

    first, *lines = export_openmetrics(folder, output, job="night", ranks=(1,), rendered=rendered)

    began, ended = STARTED, STARTED + 30
    rules = [
        f"  promtool tsdb create-blocks-from rules --start={began:.0f} --end={ended + 15:.0f} "
        f"--url=http://127.0.0.1:9095 --output-dir=data {rendered}/backfill/{name}.yaml"
        for name in ("recording-1", "recording-2")
    ]
    assert re.fullmatch(
        rf"\d+ samples of \d+ series of run {RUN}, {utc(began)} to {utc(ended)}", first
    )
    assert lines == [
        "To see the run in Grafana:",
        f"  promtool tsdb create-blocks-from openmetrics '{output}' data",
        "  touch empty.yml && prometheus --config.file=empty.yml --storage.tsdb.path=data \\",
        "      --storage.tsdb.retention.time=10y --query.lookback-delta=60s \\",
        "      --web.listen-address=127.0.0.1:9095 &",
        "  For the recorded series, the next commands in order; wait a minute after each one, or "
        "restart",
        "  Prometheus, because it finds new blocks once a minute:",
        *rules,
        "What the run has not recorded is missing in these panels:",
        "  Page / Both (partly empty): zerowatch_mfu_ratio",
        "  Page / Neither (empty): zerowatch_mfu_ratio, zerowatch_tokens_total",
    ]


def utc(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_seconds))
