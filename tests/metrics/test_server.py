"""Tests of the HTTP server of a rank: pages, failures, slow clients and closing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading

import pytest
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.overhead import (
    EXPORTER_FAILURES,
    WATCH_LAST_UPDATE_TIMESTAMP,
    WATCH_SECONDS,
)
from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.exporters.listener import MAX_CLIENTS
from zerowatch.metrics.exporters.server import STALE_SECONDS

TARGETS = [{"targets": ["127.0.0.1:9464"], "labels": {"run": "night-7", "rank": "0"}}]


def test_metrics_are_served_with_the_rank_of_the_server(make_server):
    address = make_server(rank=3).start()

    status, content_type, text = get(address)

    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'zerowatch_steps_total{rank="3"} 4.0\n' in text


def test_a_client_that_asks_for_openmetrics_gets_it(make_server):
    address = make_server().start()

    _, content_type, text = get(address, Accept="application/openmetrics-text;version=1.0.0")

    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


def test_a_scrape_of_another_run_is_refused(make_server):
    address = make_server(serves_run=lambda run: run == "night-8").start()

    pages = [get(address, f"/metrics?run={run}") for run in ("night-7", "night-8")]

    assert [status for status, _, _ in pages] == [404, 200]
    assert "night-7" in pages[0][2]
    assert "zerowatch_steps_total" not in pages[0][2]


def test_targets_are_served_as_json(make_server):
    address = make_server(targets=lambda: TARGETS).start()

    status, content_type, text = get(address, "/targets")

    assert (status, content_type, json.loads(text)) == (200, "application/json", TARGETS)


def test_a_rank_without_targets_refers_to_rank_zero(make_server):
    address = make_server(rank=1).start()

    status, _, text = get(address, "/targets")

    assert status == 404
    assert text == "No such page. Rank 1 serves / /metrics /healthz; /targets is on rank 0.\n"


def test_an_unknown_path_is_answered_with_the_known_paths(make_server):
    address = make_server(targets=lambda: TARGETS).start()

    assert get(address, "/metric") == (
        404,
        "text/plain",
        "No such page. Rank 0 serves / /metrics /healthz /targets.\n",
    )


def test_the_health_page_is_ok_while_the_metrics_are_updated(make_server, recorder):
    clock = [1000.0]
    address = make_server(unix_now=lambda: clock[0]).start()

    assert get(address, "/healthz") == (200, "text/plain", "ok\n")  # no update yet
    clock[0] += 2 * STALE_SECONDS
    recorder.set(WATCH_LAST_UPDATE_TIMESTAMP, clock[0])
    clock[0] += STALE_SECONDS
    assert get(address, "/healthz") == (200, "text/plain", "ok\n")


@pytest.mark.parametrize("was_updated", [False, True])
def test_the_health_page_fails_when_the_metrics_are_no_longer_updated(
    make_server, recorder, was_updated
):
    clock = [1000.0]
    address = make_server(rank=3, unix_now=lambda: clock[0]).start()
    if was_updated:
        recorder.set(WATCH_LAST_UPDATE_TIMESTAMP, clock[0])
    clock[0] += STALE_SECONDS + 1

    status, _, text = get(address, "/healthz")

    assert status == 503
    assert "31 s ago" in text
    assert "rank 3" in text


def test_the_health_page_fails_at_once_when_the_watch_thread_has_ended(make_server, recorder):
    recorder.set(WATCH_LAST_UPDATE_TIMESTAMP, 1000.0)
    address = make_server(unix_now=lambda: 1001.0, is_watch_dead=lambda: True).start()

    status, _, text = get(address, "/healthz")

    assert (status, "watch thread has ended" in text) == (503, True)


def test_the_health_page_is_ok_after_the_end_of_the_run(make_server, recorder):
    recorder.set(WATCH_LAST_UPDATE_TIMESTAMP, 1000.0)
    recorder.set(RUN_ACTIVE, 0)
    address = make_server(unix_now=lambda: 5000.0).start()

    assert get(address, "/healthz") == (200, "text/plain", "ok, the run has ended\n")


def test_the_index_page_links_the_other_pages(make_server):
    assert '<a href="/metrics">' in get(make_server().start(), "/")[2]


def test_a_query_string_is_ignored(make_server):
    address = make_server().start()

    assert get(address, "/healthz?verbose=1")[0] == 200


def test_nothing_is_served_when_serving_is_disabled(make_server):
    assert make_server(enabled=False).start() is None


def test_requests_are_not_logged(make_server, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    address = make_server().start()

    get(address)
    get(address, "/nowhere")

    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def serving_threads() -> list[str]:
    """Return the names of the server's threads, without other threads of the process."""
    names = [thread.name for thread in threading.enumerate()]
    return [each for each in names if "process_request_thread" in each or each == "zerowatch-http"]


def test_a_client_that_disconnects_causes_no_traceback_and_no_counted_failure(
    make_server, recorder, capfd
):
    host, port = make_server().start().rsplit(":", 1)

    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as client:
            reset_on_close = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")

    assert get(f"{host}:{port}")[0] == 200
    assert eventually(lambda: serving_threads() == ["zerowatch-http"])
    assert capfd.readouterr().err == ""
    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 0


def test_a_failing_scrape_returns_500_is_counted_and_logged_once(make_server, recorder, caplog):
    def broken_targets():
        raise ValueError("no store")

    address = make_server(targets=broken_targets).start()

    statuses = [get(address, "/targets")[0] for _ in range(3)]

    assert statuses == [500, 500, 500]
    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 3
    [record] = caplog.records
    assert "rank 0 could not answer a scrape: no store" in record.message
    assert record.exc_info is not None
    assert get(address)[0] == 200


def test_a_client_too_many_replaces_the_oldest_one(make_server, recorder):
    host, port = make_server().start().rsplit(":", 1)

    with contextlib.ExitStack() as clients:
        oldest, *_ = [
            clients.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(MAX_CLIENTS + 1)
        ]
        assert oldest.recv(1) == b""
        assert serving_threads() == ["zerowatch-http"]

    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 1
    assert get(f"{host}:{port}")[0] == 200


def test_the_cpu_time_of_serving_is_counted(make_server, recorder):
    address = make_server().start()
    get(address)

    def seconds() -> float:
        return recorder.snapshot().value(WATCH_SECONDS, "http_thread") or 0.0

    assert eventually(lambda: seconds() > 0)
    assert seconds() < 1


def test_after_close_the_port_is_free_and_close_can_be_called_again(make_server):
    server = make_server()
    host, port = server.start().rsplit(":", 1)

    server.close()
    server.close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)
    assert eventually(lambda: serving_threads() == [])


def test_a_server_that_never_started_can_be_closed(make_server):
    server = make_server()

    server.wait_for_final_scrape()
    server.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_close_in_a_forked_child_releases_the_port_and_keeps_the_server_of_the_parent(make_server):
    server = make_server()
    address = server.start()

    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends a child whose close() hangs
        server.close()
        signal.alarm(0)
        os.kill(os.getpid(), signal.SIGSTOP)  # alive, without the port
        os._exit(0)
    try:
        _, status = os.waitpid(child, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert get(address)[0] == 200
        server.close()
        port = int(address.rsplit(":", 1)[1])
        assert make_server(port=port, strict_port=True).start() == address
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
