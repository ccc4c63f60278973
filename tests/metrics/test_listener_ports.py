"""Tests of the port of the HTTP listener: fallback ports, errors and advertised addresses."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import subprocess
import sys

import pytest
from fakes.scraper import eventually, get

from zerowatch.metrics.exporters import listener
from zerowatch.metrics.exporters.listener import candidate_ports


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def answers(address: str) -> bool:
    try:
        return get(address)[0] == 200
    except OSError:
        return False


@contextlib.contextmanager
def row_of_taken_ports():
    """Listen on a port and its five fallback ports, at the first place where all six are free."""
    while True:
        with contextlib.ExitStack() as row, contextlib.suppress(OSError, OverflowError):
            first = row.enter_context(socket.create_server(("127.0.0.1", 0)))
            others = [
                row.enter_context(socket.create_server(("127.0.0.1", port_of(first) + 100 * step)))
                for step in range(1, 6)
            ]
            held = row.pop_all()
            break
    with held:
        yield [first, *others]


@pytest.mark.parametrize(
    ("local_rank", "strict", "ports"),
    [
        (0, False, (9464, 9564, 9664, 9764, 9864, 9964, 0)),
        (7, False, (9471, 9571, 9671, 9771, 9871, 9971, 0)),
        (7, True, (9471,)),
    ],
)
def test_fallback_ports_are_in_steps_of_a_hundred(local_rank, strict, ports):
    assert candidate_ports(9464, local_rank, strict=strict) == ports


def test_no_port_above_65535_is_tried():
    assert candidate_ports(65300, 0, strict=False) == (65300, 65400, 65500, 0)


def test_a_rank_uses_the_next_fallback_port_when_its_port_is_in_use(make_server, caplog):
    caplog.set_level(logging.WARNING)
    with row_of_taken_ports() as [own, next_one, *_]:
        port, next_port = port_of(own), port_of(next_one)
        next_one.close()

        address = make_server(port=port).start()

        assert get(address)[0] == 200
    assert address == f"127.0.0.1:{next_port}"
    assert [record.message for record in caplog.records] == [
        f"port {port} is taken: local rank 0 serves on {next_port} instead. "
        "/targets and targets.json list that port; a Prometheus with targets of its own needs it, "
        "or set serve.port."
    ]


def test_a_rank_uses_any_free_port_when_all_fallback_ports_are_in_use(make_server):
    with row_of_taken_ports() as row:
        address = make_server(port=port_of(row[0])).start()

        assert get(address)[0] == 200


def test_a_rank_on_a_fallback_port_also_serves_on_its_own_once_that_is_free(
    make_server, monkeypatch
):
    monkeypatch.setattr(listener, "PORT_RETRY_SECONDS", 0.01)
    with row_of_taken_ports() as [own, *_]:
        port = port_of(own)
        address = make_server(port=port).start()

    assert eventually(lambda: answers(f"127.0.0.1:{port}"))
    assert get(address)[0] == 200


def test_a_strict_port_in_use_is_waited_for(make_server, monkeypatch, caplog):
    monkeypatch.setattr(listener, "PORT_RETRY_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port_of(taken)
        server = make_server(port=port, strict_port=True, linger_seconds=60)
        address = server.start()
        was_listening = server.is_listening

    assert address == f"127.0.0.1:{port}"
    assert eventually(lambda: answers(address))
    assert (was_listening, server.is_listening) == (False, True)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        (
            "WARNING",
            f"port {port} of 127.0.0.1 is taken and serve.strict_port is set: local rank 0 serves "
            "no metrics until it is free, and tries for 75 s; free the port or set another "
            "serve.port",
        )
    ]


def test_a_port_that_does_not_become_free_is_given_up(make_server, monkeypatch, caplog):
    monkeypatch.setattr(listener, "PORT_PATIENCE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port_of(taken)
        make_server(port=port, strict_port=True, linger_seconds=0).start()

        assert eventually(lambda: len(caplog.records) == 2)
    assert caplog.records[1].levelname == "ERROR"
    assert f"no metrics are served: port {port} is still not free" in caplog.records[1].message


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1:"),
        ({"host": "no-such-host.invalid"}, "cannot listen on no-such-host.invalid:"),
        ({"port": 65535, "strict_port": True}, "serve.port 65535 + local rank 1 is above 65535"),
    ],
    ids=["not of this machine", "unknown name", "beyond the last port"],
)
def test_an_unusable_address_disables_serving_and_logs_one_line(
    make_server, caplog, settings, advice
):
    address = make_server(local_rank=1, **settings).start()

    assert address is None
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert advice in record.message


def test_targets_have_the_host_name_of_the_setting(make_server):
    address = make_server(advertise_host="node7.example").start()

    assert address.startswith("node7.example:")


def test_an_ipv6_address_is_advertised_in_brackets(make_server):
    address = make_server(host="::1").start()

    if address is None:
        pytest.skip("this machine has no IPv6 loopback")
    host, port = address.rsplit(":", 1)
    assert host == "[::1]"
    socket.create_connection(("::1", int(port)), timeout=60).close()


SERVE_TO_ALL = """
import logging, sys
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen

logging.basicConfig(format="%(levelname)s %(message)s")
serve = ServeSettings(port=0, host=sys.argv[1])
server = MetricsServer(
    recorder=Recorder(), rank=int(sys.argv[2]), local_rank=0, settings=serve, targets=None,
    make_thread=FailOpen().thread
)
print(server.start().rsplit(":", 1)[0])
server.close()
"""


def has_own_network() -> bool:
    """Return whether a process can be started in a network namespace of its own."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rn", "true"]).returncode == 0


@pytest.mark.skipif(not has_own_network(), reason="unshare may not make a network namespace here")
@pytest.mark.parametrize(
    ("host", "rank", "num_warnings"), [("0.0.0.0", 0, 1), ("0.0.0.0", 1, 0), ("127.0.0.1", 0, 0)]
)
def test_listening_on_all_interfaces_is_warned_of_once_with_its_host(host, rank, num_warnings):
    run = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", SERVE_TO_ALL, host, str(rank)],
        capture_output=True,
        text=True,
        timeout=600,
    )

    warnings = run.stderr.splitlines()
    assert len(warnings) == num_warnings, run.stderr
    assert all("WARNING metrics are served on 0.0.0.0 without TLS" in line for line in warnings)
    assert run.stdout.strip() == (socket.gethostname() if host == "0.0.0.0" else host)
