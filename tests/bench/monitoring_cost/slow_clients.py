"""Measures how long scrapes take while many clients send their requests slowly."""

from __future__ import annotations

import contextlib
import http.client
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.bench_options import Options
from bench.monitoring_cost.scrape_client import scrape
from bench.result_table import Row

GOAL_SECONDS = 1.0
NUMBERS_OF_CLIENTS = (8, 200)


def bench(options: Options) -> Iterator[Row]:
    """Yield the seconds of a scrape beside 8 and beside 200 slow clients."""
    command = [sys.executable, str(Path(__file__).with_name("scrape_cost_job.py"))]
    for number in NUMBERS_OF_CLIENTS:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            try:
                with slow_clients(address, number):
                    yield _row(address, number, scrapes=5 if options.quick else 30)
            finally:
                server.kill()


def _row(address: str, number: int, scrapes: int) -> Row:
    seconds, num_failed = [], 0
    for _ in range(scrapes):
        time.sleep(0.2)
        began = time.monotonic()
        try:
            scrape(address)
            seconds.append(time.monotonic() - began)
        except (OSError, http.client.HTTPException):
            num_failed += 1
    slowest = max(seconds, default=float("inf"))
    middle = statistics.median(seconds) if seconds else float("inf")
    return Row(
        what=f"scrape beside {number} slow clients",
        measured=f"slowest {1000 * slowest:.0f} ms, {num_failed} of {scrapes} failed",
        spread=f"median {1000 * middle:.0f} ms",
        goal=f"all <= {GOAL_SECONDS:g} s",
        met=not num_failed and slowest <= GOAL_SECONDS,
    )


@contextlib.contextmanager
def slow_clients(address: str, number: int) -> Iterator[None]:
    """Connect all at once, then send a byte a second on each; what the server closes reconnects."""
    stop = threading.Event()
    thread = threading.Thread(target=_drip, args=(address, number, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _drip(address: str, number: int, stop: threading.Event) -> None:
    host, port = address.rsplit(":", 1)
    clients: dict[int, socket.socket] = {}
    while not stop.is_set():
        for place in range(number):
            with contextlib.suppress(OSError):
                if place not in clients:
                    clients[place] = socket.create_connection((host, int(port)), timeout=5)
                    clients[place].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
                try:
                    clients[place].sendall(b"x")
                except OSError:
                    clients.pop(place).close()
        stop.wait(1)
    for client in clients.values():
        client.close()
