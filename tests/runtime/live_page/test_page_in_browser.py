"""Tests of the live page in a browser: its figures, widths, proxies, authorization and origins."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading

import live_runs
import pytest
from browser import Visit, open_browser
from fakes.scraper import get
from live_runs import LiveRun
from prometheus_client.parser import text_string_to_metric_families
from recorded_runs import STARTED, write_run

from zerowatch.metrics.catalog import training
from zerowatch.metrics.exporters import listener
from zerowatch.metrics.exporters.listener import MAX_STREAMS

FOREIGN_NAME = "attacker.example"


@pytest.fixture(scope="module")
def browser():
    with open_browser(f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1") as opened:
        yield opened


@pytest.fixture
def make_run():
    with contextlib.ExitStack() as runs:

        def make(folder=None, **settings) -> LiveRun:
            run = LiveRun(folder, **settings)
            runs.callback(run.close)
            return run

        yield make


@pytest.fixture
def run(make_run):
    run = make_run()
    run.add_steps(120)
    return run


@pytest.fixture
def visit(browser):
    """A function that opens a page in a context of its own, and waits for figures."""
    with contextlib.ExitStack() as contexts:

        def open_page(url: str, *, awaits: str = ".card", **context) -> Visit:
            visit = Visit(browser, **context)
            contexts.callback(visit.context.close)
            visit.page.goto(url)
            visit.page.wait_for_selector(awaits)
            return visit

        yield open_page


def series_of(address: str) -> dict[tuple[str, ...], float]:
    """The samples of /metrics, by name and label values in alphabetic order, without the rank."""
    _, _, text = get(address)
    return {
        (sample.name, *sorted(v for name, v in sample.labels.items() if name != "rank")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_figures_on_the_page_are_those_of_the_metrics(run, visit):
    shown = visit(f"http://{run.address}/").figures()

    series = series_of(run.address)
    of_key = {
        "training.steps": ("zerowatch_steps_total",),
        "training.loss": ("zerowatch_loss",),
        "training.step_seconds.0.5": ("zerowatch_step_duration_quantile_seconds", "0.5"),
        "communication.exposed_seconds": ("zerowatch_comm_exposed_seconds_total", "dp"),
        "communication.coverage": ("zerowatch_comm_coverage_ratio",),
        "memory.cpu.allocated": ("zerowatch_memory_bytes", "allocated", "cpu"),
        "memory.cpu.peak": ("zerowatch_memory_peak_bytes", "allocated", "cpu"),
        "memory.cpu.limit": ("zerowatch_memory_limit_bytes", "cpu"),
        "memory.cpu.risk": ("zerowatch_oom_risk_ratio", "cpu"),
        "memory.cpu.baseline": ("zerowatch_memory_baseline_bytes", "cpu"),
        "tuner.knobs.reduce_bucket_size": ("zerowatch_tuner_knob_value", "reduce_bucket_size"),
        **{
            f"phases.{phase}": ("zerowatch_phase_seconds_total", phase)
            for phase in ("forward", "backward", "optimizer", "other")
        },
        **{
            f"causes.{cause}": ("zerowatch_comm_cause_seconds_total", cause)
            for cause in ("imbalance", "bandwidth")
        },
        **{
            f"memory.cpu.{category}": (
                "zerowatch_memory_category_bytes",
                *sorted(("cpu", category)),
            )
            for category in ("parameters", "gradients", "optimizer", "activations")
        },
    }
    assert {key: shown.get(key) for key in of_key} == {
        key: series[name] for key, name in of_key.items()
    }
    assert shown["communication.exposed_ratio"] == pytest.approx(0.2)
    assert shown["ranks.1.comm_wait"] == 0.01
    assert shown["memory.risk"] == 0.03  # of rank 1; that of rank 0 is 0.02


def test_the_page_shows_new_steps_without_loading_again(run, visit, monkeypatch):
    monkeypatch.setattr(listener, "EVENT_SECONDS", 0.05)
    opened = visit(f"http://{run.address}/")

    run.add_steps(4, loss=1.25)

    opened.page.wait_for_selector('[data-key="training.loss"][data-value="1.25"]')
    assert opened.figures()["training.steps"] == 124
    paths = [url.partition(run.address)[2] for _, url in opened.requests]
    assert paths[0] == "/"
    assert set(paths[1:]) == {"/live/events"}  # again if a busy machine has cut the stream


def test_no_request_fails_and_all_go_to_the_run_and_only_read(run, visit):
    opened = visit(f"http://{run.address}/")
    opened.page.click("text=all")
    opened.page.wait_for_timeout(100)

    assert opened.problems == []
    assert {method for method, _ in opened.requests} == {"GET"}
    assert all(url.startswith(f"http://{run.address}/") for _, url in opened.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_with_all_charts(run, visit, width, scheme):
    opened = visit(
        f"http://{run.address}/",
        awaits=".chart:nth-child(5) canvas",
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
    )

    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    charts = opened.page.locator(".chart").all()
    boxes = [chart.bounding_box() for chart in charts]
    assert len(boxes) == 5
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(17, 21, 26)") == (scheme == "dark")


def test_all_steps_include_those_of_the_run_log(make_run, visit, tmp_path):
    run = make_run(write_run(tmp_path / "run", ranks=1, steps=50))
    run.add_steps(4, ended_at=STARTED + 30)
    opened = visit(f"http://{run.address}/", awaits=".chart canvas")

    with opened.page.expect_response(lambda answer: answer.url.endswith("/live/older")):
        opened.page.click("text=all")

    wait_for_left_end(opened, STARTED + 0.5)
    assert opened.problems == []


def wait_for_left_end(visit: Visit, ended_at: float) -> None:
    """Wait until the legend, at the left end of a chart, shows when its first step ended."""
    place = visit.page.locator(".chart .u-over").first.bounding_box()
    visit.page.mouse.move(place["x"] + 1, place["y"] + place["height"] / 2)
    visit.page.wait_for_function(
        "first => document.querySelector('.chart .u-legend .u-value').textContent === "
        "new Date(1000 * first).toLocaleTimeString()",
        arg=ended_at,
    )


def test_all_steps_include_those_of_the_attempt_before(make_run, visit, tmp_path):
    first = make_run()
    first.add_steps(4, ended_at=STARTED + 30)
    opened = visit(f"http://{first.address}/", awaits=".chart canvas")
    with opened.page.expect_response(
        lambda answer: answer.url.endswith("/live/older") and '"ready"' in answer.text()
    ):
        opened.page.click("text=all")
    wait_for_left_end(opened, STARTED + 29)

    first.close()
    log = write_run(tmp_path / "run", ranks=1, steps=50)
    second = make_run(log, port=int(first.address.rsplit(":", 1)[1]))
    second.add_steps(4, ended_at=STARTED + 3600)

    wait_for_left_end(opened, STARTED + 0.5)


def test_all_steps_are_of_the_run_that_is_shown(make_run, visit, tmp_path, monkeypatch):
    first = make_run(write_run(tmp_path / "run", ranks=1, steps=50))
    first.add_steps(4, ended_at=STARTED + 30)
    opened = visit(f"http://{first.address}/", awaits=".chart canvas")
    opened.page.click("text=all")
    wait_for_left_end(opened, STARTED + 0.5)

    first.close()
    monkeypatch.setattr(live_runs, "RUN_ID", "morning-8")
    second = make_run(port=int(first.address.rsplit(":", 1)[1]))
    second.add_steps(4, ended_at=STARTED + 3600)

    opened.page.wait_for_selector("#run:text('morning-8')")
    wait_for_left_end(opened, STARTED + 3599)


def test_a_page_that_polls_asks_for_merged_points_once_it_has_many(run, browser):
    _, _, text = get(run.address, "/live/state")
    answer = json.loads(text)
    points = answer["points"]
    for columns in (points, points["phases"], points["peak_bytes"]):
        columns |= {name: 100 * each for name, each in columns.items() if isinstance(each, list)}
    points["ended_at"] = [STARTED + number for number in range(len(points["step"]))]
    visit = Visit(browser)
    with contextlib.closing(visit.context):
        visit.page.route("**/live/events", lambda route: route.fulfill(status=503))
        visit.page.route("**/live/state**", lambda route: route.fulfill(json=answer))

        visit.page.clock.install()
        visit.page.goto(f"http://{run.address}/")
        visit.page.wait_for_selector("#connection:text('updated every')")

        with visit.page.expect_request("**/live/state**") as asked:
            visit.page.clock.fast_forward(5000)

    assert "since" not in asked.value.url


def test_shares_of_phases_are_of_training_time_and_those_of_evaluation_of_wall_time(run, visit):
    run.recorder.add(training.PHASE_SECONDS, 40.0, "eval")  # beside 60 s of training

    page = visit(f"http://{run.address}/").page

    rows = [row.split("\t") for row in page.inner_text("#phases").split("\n")[1:]]
    assert {name: share for name, _, share, _ in rows} == {
        "forward": "20 %",
        "backward": "60 %",
        "optimizer": "10 %",
        "other": "10 %",
        "eval, of wall time": "40 %",
    }


def test_a_run_that_ends_is_shown_as_ended(run, visit):
    opened = visit(f"http://{run.address}/")

    run.end("completed")

    opened.page.wait_for_selector("#status:text('completed')")
    opened.page.wait_for_selector("#connection:text('the run has ended')")


def test_a_page_without_a_free_stream_polls(run, browser, visit):
    opened = [visit(f"http://{run.address}/") for _ in range(MAX_STREAMS)]

    one_more = visit(f"http://{run.address}/")

    assert one_more.figures()["training.steps"] == 120
    one_more.page.wait_for_selector("#connection:text('updated every')")
    assert all(each.problems == [] for each in opened)


def test_basic_auth_opens_the_page_and_its_stream(make_run, visit, tmp_path):
    users = tmp_path / "users"
    users.write_text("ann:s3cret\n")
    run = make_run(basic_auth_file=users)
    run.add_steps(10)

    opened = visit(
        f"http://{run.address}/", http_credentials={"username": "ann", "password": "s3cret"}
    )

    assert opened.figures()["training.steps"] == 10


def test_a_bearer_token_can_be_entered_on_the_page(make_run, visit, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("s3cret")
    run = make_run(auth_token_file=secret)
    run.add_steps(10)
    opened = visit(f"http://{run.address}/", awaits="#token")

    opened.page.fill("#token", "wrong")
    opened.page.click("#login button")
    opened.page.wait_for_selector("#connection:text('refused')")
    opened.page.fill("#token", "s3cret")
    opened.page.click("#login button")

    opened.page.wait_for_selector(".card")
    assert opened.figures()["training.steps"] == 10


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards the pages below a prefix, as the proxy of a notebook server does."""

    PREFIX = "/user/ann/proxy/9464"
    target = ""

    def do_GET(self) -> None:
        if not self.path.startswith(f"{self.PREFIX}/"):
            self.send_error(404)
            return
        host, port = self.target.rsplit(":", 1)
        client = http.client.HTTPConnection(host, int(port), timeout=120)
        with contextlib.closing(client), contextlib.suppress(OSError):
            client.request("GET", self.path.removeprefix(self.PREFIX))
            response = client.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                self.send_header(name, value)
            self.end_headers()
            while data := response.read1(65536):
                self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _ForeignSite(http.server.BaseHTTPRequestHandler):
    """An empty page of another origin."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>foreign</title><p>foreign</p>")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def serve():
    """A function that serves pages by a handler, and returns the address."""
    with contextlib.ExitStack() as servers:

        def start(handler) -> str:
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            servers.callback(thread.join)
            servers.callback(server.server_close)
            servers.callback(server.shutdown)
            return f"127.0.0.1:{server.server_port}"

        yield start


def test_the_page_works_behind_a_proxy_that_adds_a_path(run, visit, serve, monkeypatch):
    monkeypatch.setattr(_Proxy, "target", run.address)

    opened = visit(f"http://{serve(_Proxy)}{_Proxy.PREFIX}/")

    assert opened.figures()["training.steps"] == 120
    assert opened.problems == []


READ = """async url => {
  try { return (await (await fetch(url)).text()).length; } catch (error) { return error.name; }
}"""
READ_BY_STREAM = """url => new Promise(done => {
  const source = new EventSource(url);
  source.onmessage = event => done(event.data.length);
  source.onerror = () => done("refused");
})"""
READ_BY_FRAME = """url => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.onload = () => {
    try { done(frame.contentDocument === null ? "refused" : frame.contentDocument.title); }
    catch (error) { done(error.name); }
  };
  frame.src = url;
  document.body.append(frame);
})"""


def test_a_page_of_another_origin_cannot_read_the_run(run, visit, serve):
    foreign = visit(f"http://{serve(_ForeignSite)}/", awaits="p").page
    paths = ("/", "/live/state", "/live/older", "/metrics", "/targets", "/healthz")

    read = [foreign.evaluate(READ, f"http://{run.address}{path}") for path in paths]

    assert read == ["TypeError"] * len(paths)
    assert foreign.evaluate(READ_BY_STREAM, f"http://{run.address}/live/events") == "refused"
    assert foreign.evaluate(READ_BY_FRAME, f"http://{run.address}/") == "refused"


# A script can set or empty these headers, but not remove the name Accept-Language.
READ_DISGUISED = """async path => {
  const headers = { "Accept-Language": "", "User-Agent": "Prometheus/3.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "10" };
  const answer = await fetch(path, { headers });
  return [answer.status, (await answer.text()).includes("zerowatch_")];
}"""


def test_a_foreign_name_for_this_machine_reads_no_page(run, visit):
    port = run.address.rsplit(":", 1)[1]
    opened = visit(f"http://{FOREIGN_NAME}:{port}/", awaits="pre").page

    read = [
        opened.evaluate(READ_DISGUISED, path)
        for path in ("/metrics", "/targets", "/live/state", "/live/events", "/")
    ]

    assert "serve.allowed_hosts" in opened.inner_text("pre")
    assert read == [[403, False]] * 5
