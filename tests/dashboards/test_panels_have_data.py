"""Every panel, recording rule and alert has data in a real run; exceptions on CPU are listed.

`pytest -s` on this file prints how many series each query got.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.scraper import eventually
from promql_parts import operands, selectors
from scripts.forked_ranks import running_ranks
from scripts.launching import SCRIPTS
from servers.free_port import free_port
from servers.grafana_reader import DashboardQuery, Reader, dashboard_queries
from servers.prometheus_server import Prometheus

from zerowatch.dashboards.build import dashboard_files
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.promql import select
from zerowatch.dashboards.recording_rules import (
    DEVICE_UTILIZATION,
    DEVICE_UTILIZATION_BY_RANK,
    OOM_RISK,
    RANK_ENDED_TIME,
)
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    training,
    tuner,
    window,
)
from zerowatch.metrics.exporters.openmetrics_file import write_openmetrics

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

# Selectors without series, and why.
NO_GPU = "needs a GPU"
HEALTHY = "nothing of this happens in a healthy run"
NOTHING_TRIED = "the tuner advises, so it has measured no change"
ABSENT = {
    select(training.LOSS_SCALE): "DeepSpeed trains in fp16 on GPUs only",
    select(devices.DEVICE_SM_ACTIVE): NO_GPU,
    select(devices.DEVICE_POWER): NO_GPU,
    select(devices.DEVICE_TEMPERATURE): NO_GPU,
    select(across_ranks.RANKS_DEVICE_TEMPERATURE): NO_GPU,
    select(devices.DEVICE_ENERGY): NO_GPU,
    select(devices.DEVICE_LINK_BYTES): NO_GPU,
    select(devices.DEVICE_INFO): NO_GPU,
    select(devices.DEVICE_LOST): NO_GPU,
    select(devices.DEVICE_XID_ERRORS): NO_GPU,
    select(devices.DEVICE_ECC_ERRORS): NO_GPU,
    select(devices.DEVICE_ROW_REMAP): NO_GPU,
    select(devices.DEVICE_LINK_ERRORS): NO_GPU,
    select(devices.DEVICE_THROTTLED_SECONDS): NO_GPU,
    select(devices.DEVICE_TEMPERATURE_LIMIT): NO_GPU,
    select(training.LAST_CHECKPOINT_BYTES): "the job saves by its engine, which gives no size",
    select(memory.MEMORY_FRAGMENTATION): NO_GPU,
    select(memory.ALLOC_RETRIES): NO_GPU,
    select(memory.MEMORY_BYTES, 'device!="cpu"'): NO_GPU,
    OOM_RISK.select('device!="cpu"'): NO_GPU,
    DEVICE_UTILIZATION.select('device!="cpu"'): NO_GPU,
    DEVICE_UTILIZATION_BY_RANK.select('device!="cpu"'): NO_GPU,
    RANK_ENDED_TIME.select(): "no rank has ended",
    select(memory.MEMORY_LEAK): HEALTHY,
    select(tuner.TUNER_GAIN): NOTHING_TRIED,
    select(tuner.TUNER_GAIN_LOWER_BOUND): NOTHING_TRIED,
    select(communication.COLLECTIVE_CALLS, 'op="all_gather"', 'phase="generate"'): "needs ZeRO 3",
    select(window.COMPRESSION_ERROR): "gradients travel as they are",
}

# Operands of alerts that are not asked for: the servers are not scraped, the run is not so old.
NOT_ASKED = ("prometheus_", "alertmanager_", "up offset ")

RUN = "dashboard-run"
TIMING = Timing(scale=1 / 120)
SHOWN_SECONDS = 60.0
PATIENCE_SECONDS = 600.0  # it takes half a minute; more only where others take the machine
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
rule_files: [recording.yaml, alerts.yaml]
scrape_configs:
  - job_name: zerowatch
    honor_labels: true
    http_sd_configs: [{{url: "http://127.0.0.1:{port}/targets", refresh_interval: 1s}}]
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A query that should have data, and the function that sends it."""

    place: str
    name: str
    promql: str
    ask: Callable[[], list[dict[str, Any]]]


class Answers:
    """The number of series that each query of dashboards, recording rules and alerts returns."""

    def __init__(self, prometheus: Prometheus, rules: Mapping[str, Any], folder: Path) -> None:
        self.prometheus, self.folder = prometheus, folder
        self._recorded = {rule["record"]: rule["expr"] for rule in _rules(rules["recording"])}
        self._absent = {absent: next(iter(selectors(absent))) for absent in ABSENT}
        self.questions = [*self._of_dashboards(), *self._of_rules(rules)]
        self.num_series: dict[Question, int] = {}

    def ask_again(self) -> bool:
        """Ask what has had no data so far; return whether everything has had some by now.

        Not all at one moment: on a busy machine a window of four scrapes has none now and then.
        """
        for question in self.questions:
            if not self.num_series.get(question):
                self.num_series[question] = len(question.ask())
        return not self.missing()

    def excuses(self, promql: str, recorded_as: str = "") -> set[str]:
        """Return the selectors of ABSENT that an expression reads, also by recording rules.

        A rule may read its own last value.
        """
        found = set()
        for name, matchers in selectors(promql):
            if name in self._recorded and name != recorded_as:
                found |= self.excuses(self._recorded[name], name)
            found |= {
                absent
                for absent, (absent_name, absent_matchers) in self._absent.items()
                if name == absent_name and absent_matchers <= matchers
            }
        return found

    def missing(self, place: str = "") -> list[str]:
        """Return the queries that have no data without an excuse, of one place or of all."""
        return [
            f"{question.place}: {question.name}: {question.promql}"
            for question in self.questions
            if place in ("", question.place)
            and not self.num_series[question]
            and not self.excuses(question.promql)
        ]

    def _of_dashboards(self) -> Iterator[Question]:
        runs = {name: [RUN] for name in ("run", "run_a", "run_b")}
        chosen = {"job": ["zerowatch"], **runs}
        reader = Reader(variables=chosen, range_seconds=SHOWN_SECONDS, scrape_seconds=0.5)
        for dashboard in DASHBOARDS:
            for query in dashboard_queries(dashboard):
                yield Question(
                    place=dashboard["uid"],
                    name=f"{query.panel} ({query.ref})",
                    promql=reader.fill_in(query, dashboard),
                    ask=partial(self._on_dashboard, reader, query, dashboard),
                )

    def _on_dashboard(
        self, reader: Reader, query: DashboardQuery, dashboard: Any
    ) -> list[dict[str, Any]]:
        return reader.ask(self.prometheus, query, dashboard, time.time())

    def _of_rules(self, rules: Mapping[str, Any]) -> Iterator[Question]:
        for rule in _rules(rules["recording"]):
            yield self._now("recording rules", rule["record"], rule["record"])
        for rule in _rules(rules["alerts"]):
            for operand in operands(rule["expr"]):
                if any(part in operand for part in NOT_ASKED):
                    continue
                yield self._now("alerts", rule["alert"], operand)

    def _now(self, place: str, name: str, promql: str) -> Question:
        ask = partial(self.prometheus.series, promql)
        return Question(place=place, name=name, promql=promql, ask=ask)


def _rules(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in file["groups"] for rule in group["rules"]]


DASHBOARDS = [json.loads(text) for text in dashboard_files().values()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Iterator[Answers]:
    """Train for real and send each query until it has data or the time limit is reached."""
    folder = tmp_path_factory.mktemp("dashboards")
    texts = {
        Path(path).stem: text
        for path, text in rule_files(TIMING).items()
        if path.startswith("prometheus/")
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    port = free_port()
    prometheus = Prometheus(folder, CONFIG.format(port=port))
    with contextlib.closing(prometheus), training_run(folder, port):
        found = Answers(
            prometheus, {name: yaml.safe_load(text) for name, text in texts.items()}, folder
        )
        both_up = f'count(up{{run="{RUN}"}} == 1) == 2'
        assert eventually(lambda: bool(prometheus.series(both_up)), PATIENCE_SECONDS, pause=0.2)
        (folder / "begin").touch()
        eventually(found.ask_again, seconds=PATIENCE_SECONDS, pause=0.5)
        yield found


@contextlib.contextmanager
def training_run(folder: Path, port: int) -> Iterator[None]:
    variables = {
        "ZEROWATCH_SERVE_PORT": str(port),
        "ZEROWATCH_SERVE_LINGER_SECONDS": "0",
        "ZEROWATCH_RUN_ID": RUN,
        "ZEROWATCH_RUN_LOG_METRICS_INTERVAL_SECONDS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    job = SCRIPTS / "monitor" / "dashboard_job.py"
    with running_ranks(2, job, folder, cwd=folder, variables=variables) as ranks:
        try:
            yield
            assert ranks.codes() == [None, None], f"the job ended early:\n{ranks.output()[-3000:]}"
        finally:
            for name in ("begin", "end"):
                (folder / name).touch()
            ranks.join()


@pytest.mark.parametrize("dashboard", [dashboard["uid"] for dashboard in DASHBOARDS])
def test_every_query_of_a_dashboard_has_data(answers, dashboard):
    assert answers.missing(dashboard) == []


def test_every_recording_rule_has_data(answers):
    assert answers.missing("recording rules") == []


def test_every_operand_of_an_alert_has_data(answers):
    assert answers.missing("alerts") == []


def test_an_export_of_the_run_has_the_series_that_prometheus_has_scraped(answers, tmp_path):
    """Names and all labels are the same, but for what Prometheus writes itself."""
    select = f'{{run="{RUN}",__name__=~"up|(zerowatch|process|python)_.+"}}'

    def difference() -> set[tuple[str, ...]]:
        with (tmp_path / "run.om").open("w") as file:
            exported = write_openmetrics(answers.folder / "runs" / RUN, file, job="zerowatch")
        scraped = (each["metric"] for each in answers.prometheus.series(select))
        return {key({"__name__": name, **labels}) for name, labels in exported.series} ^ set(
            map(key, scraped)
        )

    def key(labels: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(sorted(f"{name}={value}" for name, value in labels.items()))

    # A series that has just begun may be in one of the two only.
    assert eventually(lambda: not difference(), PATIENCE_SECONDS, pause=1.0), difference()


def test_series_listed_as_absent_have_no_data(answers):
    there = [absent for absent in ABSENT if answers.prometheus.series(absent)]

    assert there == []


def test_series_listed_as_absent_are_used_by_some_query(answers):
    read = set().union(*(answers.excuses(question.promql) for question in answers.questions))

    assert set(ABSENT) - read == set()


def test_print_the_number_of_series_of_each_query(answers):
    """Print a table that is visible with `pytest -s`."""
    print("\n| where | what | series | if none, why |\n|---|---|---|---|")
    for question, count in answers.num_series.items():
        why = "" if count else "; ".join(ABSENT[a] for a in answers.excuses(question.promql))
        print(f"| {question.place} | {question.name} | {count} | {why} |")

    assert any(answers.num_series.values())
