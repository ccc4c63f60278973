"""Tests of the HTTP listener with TLS: accepted clients, and errors about unusable files."""

from __future__ import annotations

import http.client
import itertools
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest
from fakes.certificates import Authority
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.exporters import listener
from zerowatch.metrics.exporters.http_connection import Response


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def client_context(authority, pair=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.fixture
def make_tls_server(make_server, authority):
    def make(**settings):
        pair = authority.issue("server")
        files = {"tls_certificate": pair.certificate, "tls_key": pair.key}
        return make_server(**{**files, **settings})

    return make


def test_metrics_are_served_over_tls(make_tls_server, authority):
    address = make_tls_server().start()

    status, _, text = get(address, tls=client_context(authority))

    assert status == 200
    assert "zerowatch_steps_total" in text


def test_a_client_without_tls_is_rejected_and_not_counted_as_a_failure(
    make_tls_server, authority, recorder, capfd
):
    address = make_tls_server().start()

    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(address)

    assert get(address, tls=client_context(authority))[0] == 200
    assert capfd.readouterr().err == ""
    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 0


def test_a_client_with_a_valid_certificate_is_accepted(make_tls_server, authority):
    address = make_tls_server(tls_client_ca=authority.certificate).start()

    status, _, _ = get(address, tls=client_context(authority, authority.issue("prometheus")))

    assert status == 200


@pytest.mark.parametrize("has_certificate", [False, True], ids=["none", "of another authority"])
def test_a_client_with_an_invalid_certificate_or_none_is_rejected(
    make_tls_server, authority, recorder, tmp_path, has_certificate
):
    address = make_tls_server(tls_client_ca=authority.certificate).start()
    stranger = Authority(tmp_path, "stranger").issue("intruder") if has_certificate else None

    with pytest.raises(ssl.SSLError):
        get(address, tls=client_context(authority, stranger))

    assert get(address, tls=client_context(authority, authority.issue("prometheus")))[0] == 200
    assert recorder.snapshot().value(EXPORTER_FAILURES, "prometheus") == 0


def test_a_client_that_never_finishes_its_handshake_does_not_block_others(
    make_tls_server, authority
):
    address = make_tls_server().start()
    host, port = address.rsplit(":", 1)

    with socket.create_connection((host, int(port)), timeout=60):
        status, _, _ = get(address, tls=client_context(authority))

    assert status == 200


@pytest.mark.parametrize("setting", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_a_missing_tls_file_disables_serving_and_is_named(
    make_tls_server, tmp_path, caplog, setting
):
    address = make_tls_server(**{setting: tmp_path / "nowhere.pem"}).start()

    assert address is None
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.message == (
        f"rank 0 serves no metrics, training continues: serve.{setting}: cannot read "
        f"{tmp_path}/nowhere.pem (No such file or directory); give a PEM file that this user may "
        "read"
    )


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
@pytest.mark.parametrize("setting", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_a_tls_file_that_is_no_regular_file_is_not_read(
    make_tls_server, tmp_path, caplog, setting, kind
):
    path = {"FIFO": tmp_path / "fifo", "folder": tmp_path, "device": Path("/dev/zero")}[kind]
    os.mkfifo(tmp_path / "fifo")
    started: list[str | None] = []
    server = make_tls_server(**{setting: path})

    # On a thread of its own, as a read of the FIFO would never return.
    thread = threading.Thread(target=lambda: started.append(server.start()), daemon=True)
    thread.start()
    thread.join(120)

    assert started == [None]
    [record] = caplog.records
    assert f"serve.{setting}: cannot read {path} (it is not a regular file)" in record.message


@pytest.mark.parametrize("setting", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_a_tls_file_that_is_not_pem_disables_serving_and_is_named(
    make_tls_server, tmp_path, caplog, setting
):
    no_pem = tmp_path / "notes.txt"
    no_pem.write_text("remember the milk\n")

    address = make_tls_server(**{setting: no_pem}).start()

    assert address is None
    [record] = caplog.records
    assert f"serve.{setting} {no_pem}" in record.message


def test_the_key_of_another_certificate_is_reported(make_tls_server, authority, caplog):
    address = make_tls_server(tls_key=authority.issue("other").key).start()

    assert address is None
    assert "KEY_VALUES_MISMATCH" in caplog.text


def test_a_key_with_a_password_is_rejected_without_a_prompt(make_server, authority, caplog):
    pair = authority.issue("locked", password=b"secret")

    address = make_server(tls_certificate=pair.certificate, tls_key=pair.key).start()

    assert address is None
    assert "its own PEM key without a password" in caplog.text


def served_name(address: str, context: ssl.SSLContext) -> str:
    """The name in the certificate that a server shows."""
    host, port = address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        ((_, name),) = client.getpeercert()["subject"][0]
        return name


def test_a_renewed_certificate_is_served_once_its_key_is_there_too(make_server, authority, caplog):
    old, new = authority.issue("old"), authority.issue("new")
    address = make_server(tls_certificate=old.certificate, tls_key=old.key).start()
    context = client_context(authority)

    before = served_name(address, context)
    new.certificate.replace(old.certificate)
    between = [served_name(address, context) for _ in range(2)]
    new.key.replace(old.key)
    after = served_name(address, context)

    assert (before, *between, after) == ("old", "old", "old", "new")
    [record] = caplog.records
    assert "KEY_VALUES_MISMATCH" in record.message


def test_the_last_certificate_stays_while_its_file_is_missing(make_tls_server, authority, caplog):
    server = make_tls_server(tls_client_ca=authority.certificate)
    address = server.start()
    context = client_context(authority, authority.issue("prometheus"))
    authority.certificate.rename(authority.certificate.with_suffix(".old"))

    assert [get(address, tls=context)[0] for _ in range(2)] == [200, 200]
    [record] = caplog.records
    assert "serve.tls_client_ca: cannot read" in record.message


def test_a_stream_of_events_goes_on_over_tls_until_the_client_leaves(
    make_server, authority, monkeypatch
):
    monkeypatch.setattr(listener, "EVENT_SECONDS", 0.02)
    count = itertools.count()

    def event() -> bytes:
        return b"data: %d\n\n" % next(count)

    def page(_) -> Response:
        return Response(content_type="text/event-stream", body=event(), next_event=event)

    pair = authority.issue("server")
    server = make_server(
        tls_certificate=pair.certificate, tls_key=pair.key, pages={"/events": page}
    )
    host, port = server.start().rsplit(":", 1)
    context = client_context(authority)
    with (
        socket.create_connection((host, int(port)), timeout=120) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b"data: 3\n\n" not in received:
            part = client.recv(65536)
            assert part, received
            received += part

    assert eventually(lambda: not server._listener._streams)
