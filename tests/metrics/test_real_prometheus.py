"""A real Prometheus discovers two ranks by /targets, scrapes them and stores exemplars."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import yaml
from fakes.scraper import eventually
from package_tree import ROOT
from servers.prometheus_server import Prometheus

from zerowatch.metrics.catalog import training
from zerowatch.metrics.catalog.training import NONFINITE_LOSSES, RUN_ACTIVE, STEP_DURATION, STEPS
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen

CLOCK_RATE = 60  # for the servers' patience a scrape a second is one a minute: none comes too late
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: zerowatch
    honor_labels: true
    http_sd_configs: [{{url: "http://{address}/targets", refresh_interval: 1s}}]
  - job_name: written by hand
    honor_labels: true
    static_configs: [{{targets: ["{address}"], labels: {{run: ended}}}}]
    relabel_configs: {relabel_configs}
  - job_name: with token
    authorization: {{type: Bearer, credentials_file: {folder}/token}}
    http_sd_configs:
      - url: "http://{secured}/targets"
        refresh_interval: 1s
        authorization: {{type: Bearer, credentials_file: {folder}/token}}
  - job_name: with password
    basic_auth: {{username: prometheus, password_file: {folder}/password}}
    static_configs: [{{targets: ["{secured}"]}}]
  - job_name: without
    static_configs: [{{targets: ["{secured}"]}}]
"""


def values(prometheus: Prometheus, expression: str) -> dict[tuple[str | None, str | None], float]:
    """Return the values of an instant query, by the labels run and rank."""
    return {
        (series["metric"].get("run"), series["metric"].get("rank")): float(series["value"][1])
        for series in prometheus.series(expression)
    }


def documented_rules() -> list[dict]:
    """Return the relabeling by run that the guide has for an existing Prometheus."""
    guide = (ROOT / "docs" / "deployment.md").read_text()
    block = guide.partition("```yaml\n")[2].partition("```")[0]
    scrape, *_ = yaml.safe_load(block)["scrape_configs"]
    return [rule for rule in scrape["relabel_configs"] if rule.get("source_labels") == ["run"]]


@pytest.fixture(scope="module")
def run():
    """Start the servers of two ranks, of which rank 0 serves the targets of both."""
    targets: list[dict] = []
    recorders, servers = [Recorder(), Recorder()], []
    with contextlib.ExitStack() as closing:
        for rank, recorder in enumerate(recorders):
            recorder.set(RUN_ACTIVE, 1)
            recorder.start_counters(training.METRICS)
            recorder.add(STEPS, 10 + rank)
            recorder.observe(STEP_DURATION, 0.07, exemplar={"trace_id": TRACE_ID})
            server = MetricsServer(
                recorder=recorder,
                rank=rank,
                local_rank=rank,
                settings=ServeSettings(port=0),
                targets=None if rank else lambda: targets,
                make_thread=FailOpen().thread,
                serves_run="night-7".__eq__,
                now=lambda: CLOCK_RATE * time.monotonic(),
            )
            closing.callback(server.close)
            servers.append(server)
            labels = {"run": "night-7", "node": "here", "rank": str(rank)}
            targets.append({"targets": [server.start()], "labels": labels})
        yield recorders, servers, targets[0]["targets"][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of Prometheus, which holds a token and a password."""
    folder = tmp_path_factory.mktemp("prometheus")
    for name, content in (
        ("token", "t0ken"),
        ("password", "s3cret"),
        ("users", "prometheus:s3cret"),
    ):
        (folder / name).write_text(f"{content}\n")
    return folder


@pytest.fixture(scope="module")
def secured(folder):
    """Start a server that asks its clients for a token or a password; return its address."""
    recorder, targets = Recorder(), []
    recorder.set(RUN_ACTIVE, 1)
    server = MetricsServer(
        recorder=recorder,
        rank=0,
        local_rank=0,
        settings=ServeSettings(
            port=0, auth_token_file=folder / "token", basic_auth_file=folder / "users"
        ),
        targets=lambda: targets,
        make_thread=FailOpen().thread,
    )
    with contextlib.closing(server):
        address = server.start()
        targets.append({"targets": [address], "labels": {"node": "here"}})
        yield address


@pytest.fixture(scope="module")
def prometheus(run, secured, folder):
    """Start one server for all tests: it takes five seconds until it scrapes what it discovers."""
    _, _, sd_address = run
    config = CONFIG.format(
        address=sd_address,
        secured=secured,
        folder=folder,
        relabel_configs=json.dumps(documented_rules()),
    )
    server = Prometheus(folder, config)
    with contextlib.closing(server):
        both_up = {("night-7", "0"): 1.0, ("night-7", "1"): 1.0}
        if not eventually(lambda: values(server, 'up{job="zerowatch"}') == both_up, pause=0.2):
            pytest.fail(f"not both ranks are up: {values(server, 'up')}")
        yield server


def test_both_ranks_are_discovered_and_keep_their_rank_label(prometheus):
    assert values(prometheus, "zerowatch_steps_total") == {
        ("night-7", "0"): 10,
        ("night-7", "1"): 11,
    }


def test_an_address_that_was_written_by_hand_stores_no_other_run_under_its_name(prometheus):
    refused = eventually(lambda: values(prometheus, 'up{run="ended"}') == {("ended", None): 0.0})

    assert refused
    assert prometheus.series('{run="ended",__name__=~"zerowatch_.*"}') == []


def test_exemplars_are_stored_with_their_trace_id(prometheus):
    now = time.time()

    found = prometheus.ask(
        "query_exemplars",
        query='zerowatch_step_duration_seconds_bucket{rank="1"}',
        start=str(now - 300),
        end=str(now + 300),
    )

    assert [exemplar["labels"] for series in found for exemplar in series["exemplars"]] == [
        {"trace_id": TRACE_ID}
    ]


def test_a_loss_that_is_nan_from_the_first_step_on_is_seen_as_an_increase(prometheus, run):
    recorders, _, _ = run
    scraped = 'zerowatch_nonfinite_losses_total{rank="0"}'
    assert eventually(lambda: values(prometheus, scraped) == {("night-7", "0"): 0}, pause=0.2)

    recorders[0].add(NONFINITE_LOSSES, 20)  # the first steps are published together

    increase = f"increase({scraped}[5m])"
    assert eventually(lambda: values(prometheus, increase).get(("night-7", "0"), 0) > 0, pause=0.2)


def test_metrics_of_the_process_have_the_labels_of_their_rank(prometheus):
    found = values(prometheus, 'process_resident_memory_bytes{job="zerowatch"}')

    assert set(found) == {("night-7", "0"), ("night-7", "1")}


def test_lingering_ends_after_prometheus_has_scraped_the_end_of_the_run(prometheus, run):
    recorders, servers, _ = run
    recorders[1].set(RUN_ACTIVE, 0)

    begun = time.monotonic()
    servers[1].wait_for_final_scrape()
    lingered = time.monotonic() - begun
    servers[1].close()

    assert lingered < CLOCK_RATE  # its patience did not end it
    assert eventually(
        lambda: values(prometheus, 'up{rank="1"}') == {("night-7", "1"): 0.0}, pause=0.2
    )
    last_seen = values(prometheus, 'last_over_time(zerowatch_run_active{rank="1"}[5m])')
    assert last_seen == {("night-7", "1"): 0.0}


def test_prometheus_scrapes_and_discovers_with_a_token_or_a_password(prometheus):
    secured = '{job=~"with.+"}'
    up = {"with token": 1.0, "with password": 1.0, "without": 0.0}
    assert eventually(lambda: values_by_job(prometheus, f"up{secured}") == up, pause=0.2)
    active = {"with token": 1.0, "with password": 1.0}
    assert values_by_job(prometheus, f"{RUN_ACTIVE.name}{secured}") == active


def values_by_job(prometheus: Prometheus, expression: str) -> dict[str, float]:
    """Return the values of an instant query, by the label job."""
    return {
        series["metric"]["job"]: float(series["value"][1])
        for series in prometheus.series(expression)
    }
