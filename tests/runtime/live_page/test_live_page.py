"""Tests of the pages of a run as a client reads them: stream, polling, older steps, headers."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys

import pytest
from fakes.clock import FakeClock
from fakes.scraper import eventually, get
from live_runs import LiveRun
from recorded_runs import STARTED, write_run

from zerowatch.metrics.exporters import listener
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.live_page import live_page


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
    return make_run()


@contextlib.contextmanager
def events_of(address: str, **headers: str):
    """The events of a stream, as objects."""
    host, port = address.rsplit(":", 1)
    client = http.client.HTTPConnection(host, int(port), timeout=120)
    with contextlib.closing(client):
        client.request("GET", "/live/events", headers=headers)
        response = client.getresponse()
        assert response.status == 200

        def events():
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield events()


def test_the_first_event_has_all_points_and_later_ones_the_new_points(run, monkeypatch):
    monkeypatch.setattr(listener, "EVENT_SECONDS", 0.02)
    run.add_steps(6)

    with events_of(run.address) as events:
        first = next(events)["points"]
        run.add_steps(2)
        later = next(event for event in events if event["points"]["step"])["points"]

    assert (first["reset"], first["step"], first["next"]) == (True, [2, 4, 6], 3)
    assert (later["reset"], later["step"], later["next"]) == (False, [8], 4)


def test_an_event_has_the_state_of_the_run(run):
    run.add_steps(6)

    with events_of(run.address) as events:
        state = next(events)["state"]

    assert state["run"]["run_id"] == "night-7"
    assert state["status"] == "training"
    assert state["training"]["steps"] == 6
    assert [problem["alert"] for problem in state["problems"]] == ["ZerowatchStragglerRank"]
    assert state["ranks"]["rows"][1]["slow"] == {"backward": 0.21}


def test_a_loss_that_was_not_finite_is_a_problem_for_longer_than_the_last_minute(make_run):
    clock = FakeClock()
    run = make_run(unix_now=clock)
    run.add_steps(2, ended_at=clock() - 100, loss=None, nonfinite_loss=True)
    run.add_steps(20, ended_at=clock())

    state = json.loads(get(run.address, "/live/state")[2])["state"]

    assert "ZerowatchLossNotFinite" in [problem["alert"] for problem in state["problems"]]


def test_the_last_event_says_how_the_run_ended(run, monkeypatch):
    monkeypatch.setattr(listener, "EVENT_SECONDS", 3600)
    with events_of(run.address) as events:
        assert next(events)["state"]["status"] == "starting"

        run.end("completed")

        assert [event["state"]["status"] for event in events] == ["completed"]


def steps_shown(run) -> float:
    return json.loads(get(run.address, "/live/state")[2])["state"]["training"]["steps"]


@pytest.mark.parametrize("change", [0.5, -3600.0], ids=["later", "after the clock was set back"])
def test_figures_are_computed_again_after_half_a_second(make_run, change):
    clock = FakeClock()
    run = make_run(unix_now=clock)
    run.add_steps(2, ended_at=clock())
    before = steps_shown(run)
    run.add_steps(2, ended_at=clock())
    at_once = steps_shown(run)

    clock.seconds += change

    assert (before, at_once, steps_shown(run)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("address", "settings", "url"),
    [
        ("node-0:9400", {}, "http://node-0:9400/"),
        (
            "node-0:9400",
            {"tls_certificate": "node.pem", "tls_key": "node.key"},
            "https://node-0:9400/",
        ),
        ("node-0:9400", {"live_page": False}, None),
        (None, {}, None),
    ],
)
def test_the_address_of_the_page_is_shown_if_the_page_is_served(address, settings, url):
    assert live_page.page_url(address, ServeSettings(**settings)) == url


def test_proxies_do_not_collect_events_and_browsers_connect_again_after_3_seconds(run):
    host, port = run.address.rsplit(":", 1)
    client = http.client.HTTPConnection(host, int(port), timeout=120)
    with contextlib.closing(client):
        client.request("GET", "/live/events")
        response = client.getresponse()

        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.readline() == b"retry: 3000\n"


def test_polling_returns_the_points_since_a_number(run):
    run.add_steps(6)

    everything = json.loads(get(run.address, "/live/state")[2])["points"]
    new = json.loads(get(run.address, "/live/state?since=2")[2])["points"]
    unknown = json.loads(get(run.address, "/live/state?since=99")[2])["points"]

    assert (everything["step"], everything["reset"]) == ([2, 4, 6], True)
    assert (new["step"], new["reset"]) == ([6], False)
    assert (unknown["step"], unknown["reset"]) == ([2, 4, 6], True)


def test_a_number_of_thousands_of_digits_is_no_number_of_a_point(run):
    run.add_steps(4)

    status, _, text = get(run.address, f"/live/state?since={'9' * 5000}")

    assert (status, json.loads(text)["points"]["reset"]) == (200, True)


def test_each_problem_has_its_section_of_the_runbook(run):
    status, _, text = get(run.address, "/live/runbook?alert=ZerowatchRankHung")
    unknown, _, _ = get(run.address, "/live/runbook?alert=../settings")

    assert (status, unknown) == (200, 404)
    assert text.startswith("## ZerowatchRankHung\n")
    assert "### What to do" in text
    assert "\n## " not in text


def test_a_stream_is_refused_to_another_origin(run):
    def status(origin: str) -> int:
        host, port = run.address.rsplit(":", 1)
        client = http.client.HTTPConnection(host, int(port), timeout=120)
        with contextlib.closing(client):
            client.request("GET", "/live/events", headers={"Origin": origin})
            return client.getresponse().status

    assert status("http://foreign.example") == 403
    assert status(f"http://{run.address}") == 200


def test_older_steps_come_from_the_run_log(make_run, tmp_path):
    folder = write_run(tmp_path / "run", ranks=1, steps=50)
    run = make_run(folder)
    run.add_steps(4, ended_at=STARTED + 23)  # the first began when step 42 of the log ended

    assert json.loads(get(run.address, "/live/older")[2]) == {"status": "reading"}
    older = eventually_older(run)

    assert older["step"] == list(range(1, 42))
    assert older["loss"][4] == 1.0


def eventually_older(run: LiveRun) -> dict:
    answers = []

    def is_read() -> bool:
        answers.append(json.loads(get(run.address, "/live/older")[2]))
        return answers[-1]["status"] != "reading"

    assert eventually(is_read)
    return answers[-1]


@pytest.mark.parametrize("change", [60.0, -600.0], ids=["later", "after the clock was set back"])
def test_older_steps_are_read_again_after_a_minute(make_run, tmp_path, change):
    clock = FakeClock()
    clock.seconds = STARTED + 1000
    folder = write_run(tmp_path / "run", ranks=1, steps=20)
    run = make_run(folder, unix_now=clock)
    get(run.address, "/live/older")
    first = eventually_older(run)["step"]

    write_run(folder, ranks=1, steps=30)
    clock.seconds += 50
    kept = eventually_older(run)["step"]
    clock.seconds += change - 50
    read_again = eventually_older(run)["step"]

    assert [steps[-1] for steps in (first, kept, read_again)] == [20, 20, 30]


def test_without_a_run_log_there_are_no_older_steps(run):
    get(run.address, "/live/older")

    assert eventually_older(run)["step"] == []


def test_a_run_log_that_cannot_be_read_is_counted_and_does_not_disturb_the_page(
    make_run, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError("disk error")

    monkeypatch.setattr(live_page, "sample_steps", fail)
    run = make_run(tmp_path)
    get(run.address, "/live/older")

    assert eventually_older(run) == {"status": "failed"}
    assert run.fail_open.failures == {"live page": 1}
    assert get(run.address, "/live/state")[0] == 200


def test_the_page_has_no_figures_and_loads_nothing_from_elsewhere(run):
    run.add_steps(6)

    status, content_type, text = get(run.address, "/")

    assert (status, content_type) == (200, "text/html; charset=utf-8")
    assert "night-7" not in text
    urls = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text.split("<script>")[0])
    urls += re.findall(r'href="([^"]+)"', text)
    assert {url for url in urls if not url.startswith("data:")} == {"metrics", "targets", "healthz"}


def test_the_content_security_policy_allows_the_parts_of_the_page_only(run):
    host, port = run.address.rsplit(":", 1)
    client = http.client.HTTPConnection(host, int(port), timeout=120)
    with contextlib.closing(client):
        client.request("GET", "/")
        response = client.getresponse()
        policy = response.headers["Content-Security-Policy"]
        text = response.read().decode()

    for name in ("script", "style"):
        parts = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in parts]
        assert len(parts) == 2
        expected = " ".join(f"'sha256-{each}'" for each in hashes)
        assert f"{name}-src {expected};" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_pages_need_authorization_and_the_refusal_has_the_form_for_a_token(make_run, tmp_path):
    secret = tmp_path / "token"
    secret.write_text("s3cret")
    run = make_run(auth_token_file=secret)
    paths = ("/", "/live/state", "/live/older", "/live/events", "/live/runbook", "/metrics")

    refused = [get(run.address, path) for path in paths]
    admitted = get(run.address, "/live/state", Authorization="Bearer s3cret")

    assert [status for status, _, _ in refused] == [401] * 6
    assert 'id="token"' in refused[0][2]
    assert all("night-7" not in text for _, _, text in refused)
    assert admitted[0] == 200


def test_the_page_and_a_file_with_any_sign_need_no_locale(tmp_path):
    script = (
        "import locale, sys; from pathlib import Path\n"
        "from zerowatch.metrics.atomic_file import atomic_write\n"
        "from zerowatch.runtime.live_page.live_page import page\n"
        "assert locale.getpreferredencoding(False) != 'UTF-8'\n"
        "atomic_write(Path(sys.argv[1]), page().body.decode())"
    )
    variables = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", script, str(tmp_path / "page.html")]

    subprocess.run(command, env=variables, check=True)

    assert (tmp_path / "page.html").read_bytes() == live_page.page().body
