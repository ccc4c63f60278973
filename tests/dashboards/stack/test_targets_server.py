"""Tests of `zerowatch targets`: answers, errors, and several runs with a real Prometheus."""

from __future__ import annotations

import configparser
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.scraper import eventually, get
from scripts.launching import ZEROWATCH
from servers.free_port import free_port
from servers.prometheus_server import Prometheus

from zerowatch.dashboards.stack.run_targets import POLL_SECONDS, WITHDRAWN_SECONDS
from zerowatch.dashboards.stack.targets_server import TargetsServer, listen_address
from zerowatch.errors import CommandLineError
from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen

CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs:
  - job_name: zerowatch
    honor_labels: true
    http_sd_configs: [{{url: "http://127.0.0.1:{port}/targets", refresh_interval: 250ms}}]
"""


UNIT = Path(__file__).resolve().parents[3] / "docker/slurm/zerowatch-targets.service"


class Run:
    """A run of some ranks in this process, with its run folder."""

    def __init__(self, runs: Path, name: str, num_ranks: int) -> None:
        self.file = runs / name / "targets.json"
        self.servers, targets = [], []
        for rank in range(num_ranks):
            recorder = Recorder()
            recorder.set(RUN_ACTIVE, 1)
            server = MetricsServer(
                recorder=recorder,
                rank=rank,
                local_rank=rank,
                settings=ServeSettings(port=0),
                targets=None,
                make_thread=FailOpen().thread,
                serves_run=lambda run: run == name,
            )
            labels = {"run": name, "node": socket.gethostname(), "rank": str(rank)}
            labels["__param_run"] = name
            targets.append({"targets": [server.start()], "labels": labels})
            self.servers.append(server)
        self.file.parent.mkdir()
        self.file.write_text(json.dumps(targets))

    def end(self) -> None:
        self.file.write_text("[]\n")
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()


@contextmanager
def serving(runs: Path, clock: FakeClock | None = None) -> Iterator[TargetsServer]:
    arguments = {} if clock is None else {"now": clock}
    server = TargetsServer(runs, "127.0.0.1", 0, **arguments)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.close()


def write_targets(runs: Path, name: str, *addresses: str, node: str = "n1") -> Path:
    file = runs / name / "targets.json"
    file.parent.mkdir(exist_ok=True)
    labels = {"run": name, "node": node}
    file.write_text(json.dumps([{"targets": [each], "labels": labels} for each in addresses]))
    return file


def test_prometheus_scrapes_all_ranks_of_several_runs_and_drops_a_run_that_ended(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    clock = FakeClock()
    one, two = Run(runs, "one", 2), Run(runs, "two", 1)
    with (
        serving(runs, clock) as server,
        closing(Prometheus(tmp_path, CONFIG.format(port=server.port))) as prometheus,
        closing(one),
        closing(two),
    ):

        def up() -> dict[tuple[str, str], str]:
            clock.seconds += POLL_SECONDS  # so that each request reads the folder
            return {
                (each["metric"]["run"], each["metric"]["rank"]): each["value"][1]
                for each in prometheus.series("up")
            }

        both = {("one", "0"): "1", ("one", "1"): "1", ("two", "0"): "1"}
        assert eventually(lambda: up() == both, pause=0.1), up()

        two.end()
        with closing(Run(runs, "three", 1)):
            clock.seconds += WITHDRAWN_SECONDS
            now_up = {("one", "0"): "1", ("one", "1"): "1", ("three", "0"): "1"}
            found = eventually(lambda: up() == now_up, pause=0.1)

            assert found, up()
            assert {each["metric"]["node"] for each in prometheus.series("up")} == {
                socket.gethostname()
            }

            runs.rename(tmp_path / "away")  # the file system is away for a moment
            clock.seconds += POLL_SECONDS
            failed = eventually(lambda: get(address(server), "/targets")[0] == 503)
            still_up = up()
            (tmp_path / "away").rename(runs)

        assert failed
        assert still_up == now_up


def address(server: TargetsServer) -> str:
    return f"127.0.0.1:{server.port}"


def test_the_targets_are_served_as_json_in_the_form_of_http_sd(tmp_path: Path) -> None:
    write_targets(tmp_path, "one", "n1:9464", "n1:9465")
    write_targets(tmp_path, "ended")

    with serving(tmp_path) as server:
        status, content_type, text = get(address(server), "/targets")

    assert (status, content_type) == (200, "application/json")
    assert json.loads(text) == [
        {"targets": [f"n1:{port}"], "labels": {"run": "one", "node": "n1"}} for port in (9464, 9465)
    ]


def test_the_folder_is_read_at_most_every_two_seconds(tmp_path: Path) -> None:
    clock = FakeClock()
    file = write_targets(tmp_path, "one", "n1:9464")
    with serving(tmp_path, clock) as server:
        first = get(address(server), "/targets")
        file.write_text(file.read_text().replace("9464", "9564"))
        at_once = get(address(server), "/targets")
        clock.seconds += POLL_SECONDS
        later = get(address(server), "/targets")

    assert at_once == first
    assert "n1:9564" in later[2]


def test_the_health_page_fails_while_the_runs_cannot_be_listed(tmp_path: Path) -> None:
    clock = FakeClock()
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs, clock) as server:
        healthy = get(address(server), "/healthz")
        runs.rmdir()
        clock.seconds += POLL_SECONDS
        failing = get(address(server), "/healthz")
        other = get(address(server), "/metrics")

    assert (healthy[0], failing[0], other[0]) == (200, 503, 404)
    assert "/targets" in other[2]


def test_a_run_that_only_its_own_host_can_reach_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    write_targets(tmp_path, "far", "127.0.0.1:9464", node="node-7")
    write_targets(tmp_path, "here", "127.0.0.1:9564", node=socket.gethostname())
    with serving(tmp_path, clock) as server:
        for _ in range(2):
            clock.seconds += POLL_SECONDS
            get(address(server), "/targets")

    (line,) = caplog.messages
    assert "run far on node-7" in line
    assert "ZEROWATCH_SERVE_HOST" in line


def test_a_folder_that_does_not_exist_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(CommandLineError, match=r"cannot list .*/runs \(No such.*--runs FOLDER"):
        TargetsServer(tmp_path / "runs", "127.0.0.1", 0)


def test_a_port_that_is_taken_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        pytest.raises(CommandLineError, match=rf"127.0.0.1:{server.port} \(.*--listen HOST:PORT"),
    ):
        TargetsServer(tmp_path, "127.0.0.1", server.port)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9463", ("0.0.0.0", 9463)),
        ("node-1:80", ("node-1", 80)),
        ("[::1]:9463", ("::1", 9463)),
    ],
)
def test_an_address_to_listen_on_has_an_optional_host(text: str, expected: tuple[str, int]) -> None:
    assert listen_address(text) == expected


@pytest.mark.parametrize("text", ["9463", "host", "a:b", "a:99999", "::1:9463", ""])
def test_another_address_to_listen_on_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"no HOST:PORT, such as 127\.0\.0\.1:9463"):
        listen_address(text)


def test_the_command_serves_until_it_is_terminated(tmp_path: Path) -> None:
    write_targets(tmp_path, "one", "n1:9464")
    port = free_port()
    command = [ZEROWATCH, "targets", "--runs", str(tmp_path), "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        answer = get(f"127.0.0.1:{port}", "/targets")
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert f"127.0.0.1:{port}/targets" in line
    assert "n1:9464" in answer[2]
    assert code == 0


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    script = "import sys, zerowatch.dashboards.stack.targets_server; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.stdout.strip() == "False", done.stderr


def test_systemd_starts_the_service_again_however_often_it_fails() -> None:
    unit = configparser.ConfigParser()
    unit.read_string(UNIT.read_text())

    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit["Service"]["Restart"] == "always"
    assert unit["Service"]["RestartSec"] == "10"
    # Without Wants=, nothing starts what the unit is ordered after.
    assert unit["Unit"]["Wants"] == unit["Unit"]["After"] == "network-online.target"
