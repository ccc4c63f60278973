"""Tests of the client: authorization, TLS, and the reasons of what goes wrong."""

from __future__ import annotations

import http.client
import http.server
import io
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fakes.certificates import Authority
from served_ranks import two_ranks

from zerowatch.errors import SettingsError
from zerowatch.runtime.top.http_client import Access, HttpClient, NoAnswerError, Page
from zerowatch.runtime.top.run_source import ServedRun


def test_a_token_file_admits_to_all_ranks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with two_ranks(auth_token_file=token) as ranks:
        view = ServedRun(ranks[0].targets_url, HttpClient(Access(token_file=token)).get).read()

    assert [rank.state for rank in view.ranks] == ["running", "running"]


def test_a_file_of_users_admits_its_first_user(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text("# monitoring\nana:pass word\nbob:other\n")
    with two_ranks(basic_auth_file=users) as ranks:
        view = ServedRun(ranks[0].targets_url, HttpClient(Access(basic_auth_file=users)).get).read()

    assert view.status == "training"


def test_a_refusal_names_the_options(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with (
        two_ranks(auth_token_file=token) as ranks,
        pytest.raises(NoAnswerError, match=r"401; give --token-file or --basic-auth-file"),
    ):
        HttpClient(Access()).get(ranks[0].targets_url)


@pytest.mark.parametrize("content", [None, ""])
def test_a_missing_or_empty_file_is_named_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)

    with pytest.raises(SettingsError, match=str(file)):
        HttpClient(Access(token_file=file))


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")

    with pytest.raises(SettingsError, match=r"ca\.pem"):
        HttpClient(Access(ca_file=file))


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """A server that sends its clients to another path, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/targets", asked
        server.shutdown()
        thread.join()


def test_a_redirect_is_not_followed(redirecting: tuple[str, list[str]]) -> None:
    url, asked = redirecting

    with pytest.raises(NoAnswerError, match="302"):
        HttpClient(Access()).get(url)

    assert asked == ["/targets"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with two_ranks() as ranks:
        assert HttpClient(Access()).get(ranks[0].targets_url).body.startswith(b"[")


@pytest.mark.parametrize("url", ["http://no-such-host.invalid/", "http://127.0.0.1:9/"])
def test_no_answer_has_a_reason(url: str) -> None:
    with pytest.raises(NoAnswerError, match=r"\w{4}"):
        HttpClient(Access()).get(url)


def test_ranks_with_tls_are_read_with_the_certificate_of_their_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.issue("rank"), authority.issue("top")
    both = tmp_path / "client.pem"
    both.write_bytes(client.certificate.read_bytes() + client.key.read_bytes())
    settings = {
        "tls_certificate": server.certificate,
        "tls_key": server.key,
        "tls_client_ca": authority.certificate,
    }
    access = Access(ca_file=authority.certificate, client_certificate=both)
    with two_ranks(**settings) as ranks:
        url = f"https://{ranks[0].address}/targets"
        view = ServedRun(url, HttpClient(access).get).read()
        with pytest.raises(NoAnswerError, match="give --ca-file"):
            HttpClient(Access()).get(url)

    assert [rank.state for rank in view.ranks] == ["running", "running"]


class Answer(io.BytesIO):
    """A response of the network, of which bytes may be missing."""

    length = 0

    def __init__(self, body: bytes, headers: Mapping[str, str | None]) -> None:
        super().__init__(body)
        self.headers = headers


class Answering:
    """Stands in for the network: answers with a body, or raises an error."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.headers: dict[str, str | None] = {"Date": None}
        self.asked: list[tuple[str, float]] = []

    def open(self, request: urllib.request.Request, timeout: float) -> Answer:
        self.asked.append((str(request.get_header("User-agent")), timeout))
        if isinstance(self.answer, Exception):
            raise self.answer
        return Answer(self.answer, self.headers)


def client_with(answer: bytes | Exception) -> tuple[HttpClient, Answering]:
    client, network = HttpClient(Access()), Answering(answer)
    client._opener = network  # type: ignore[assignment]
    return client, network


def http_error(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://a", code, "", http.client.HTTPMessage(), io.BytesIO())


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "[SSL]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (http_error(401), "refused with 401; give --token-file or --basic-auth-file"),
        (http_error(403), "refused with 403; give --token-file or --basic-auth-file"),
        (http_error(404), "another run, or another program, is at this address (404)"),
        (http_error(500), "answered with 500"),
        (urllib.error.URLError(TimeoutError()), "timed out"),
        (TimeoutError(), "timed out"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")),
         "connection refused"),
        (tls_error("WRONG_VERSION_NUMBER"), "no TLS (WRONG_VERSION_NUMBER)"),
        (http.client.IncompleteRead(b""), "IncompleteRead(0 bytes read)"),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_each_error_has_a_reason(error: Exception, reason: str) -> None:
    client, _ = client_with(error)

    with pytest.raises(NoAnswerError) as raised:
        client.get("http://a:1/targets")

    assert str(raised.value) == reason


def test_an_answer_has_at_most_16_mib() -> None:
    whole, network = client_with(b"x" * 2**24)
    larger, _ = client_with(b"x" * (2**24 + 1))

    assert len(whole.get("http://a:1/").body) == 2**24
    assert network.asked == [("zerowatch-top", 4.0)]
    with pytest.raises(NoAnswerError, match="more than 16 MiB"):
        larger.get("http://a:1/")


@pytest.mark.parametrize("sent", ["whole", "cut o"])
def test_an_answer_that_is_cut_off_is_none(sent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                head = "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n"
                connection.sendall(f"{head}{sent.partition(' ')[0]}".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            body = HttpClient(Access()).get(f"http://127.0.0.1:{server.getsockname()[1]}/").body
        except NoAnswerError as error:
            body = str(error).encode()
        thread.join()

    whole = sent == "whole"
    assert body == (b"whole" if whole else b"its answer was cut off, 2 bytes are missing")


@pytest.mark.parametrize(
    ("date", "sent_at"),
    [(None, None), ("yesterday", None), ("Sat, 28 Nov 2026 01:52:54 GMT", 1_795_830_774.0)],
)
def test_an_answer_has_the_time_of_the_server(date: str | None, sent_at: float | None) -> None:
    client, network = client_with(b"[]")
    network.headers["Date"] = date

    assert client.get("http://a:1/") == Page(b"[]", sent_at)
