"""Tests of bearer token and basic auth: who is admitted, changed files, and the refusal."""

from __future__ import annotations

import base64
import http.client
import os

import pytest
from fakes.scraper import get

from zerowatch.errors import SettingsError
from zerowatch.metrics.exporters.client_auth import ClientAuth, authorization_header
from zerowatch.metrics.settings import ServeSettings

TOKEN, USERS = "t0ken-7", "prometheus:s3cret\n# a comment\nadmin:pa:ss\n"


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture
def users_file(tmp_path):
    file = tmp_path / "users"
    file.write_text(USERS)
    return file


def status(address: str, authorization: str | None = None, path: str = "/metrics") -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    return get(address, path, **headers)[0]


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN} ", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer t0ken-", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer \u00e9", 401),
    ],
)
def test_only_the_bearer_of_the_token_is_admitted(make_server, token_file, authorization, expected):
    address = make_server(auth_token_file=token_file).start()

    assert status(address, authorization) == expected


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (basic("prometheus:s3cret"), 200),
        (basic("admin:pa:ss"), 200),
        (basic("prometheus:pa:ss"), 401),
        (basic("prometheus"), 401),
        (basic("# a comment"), 401),
        (basic(""), 401),
        ("Basic %%%", 401),
        ("Bearer prometheus:s3cret", 401),
        (None, 401),
    ],
)
def test_only_users_of_the_file_are_admitted(make_server, users_file, authorization, expected):
    address = make_server(basic_auth_file=users_file).start()

    assert status(address, authorization) == expected


def test_with_both_files_either_secret_is_enough(make_server, token_file, users_file):
    address = make_server(auth_token_file=token_file, basic_auth_file=users_file).start()

    assert status(address, f"Bearer {TOKEN}") == 200
    assert status(address, basic("prometheus:s3cret")) == 200
    assert status(address) == 401


def test_a_refusal_names_the_schemes_and_shows_no_metrics(make_server, token_file, users_file):
    address = make_server(auth_token_file=token_file, basic_auth_file=users_file).start()
    client = http.client.HTTPConnection(address, timeout=60)

    client.request("GET", "/metrics")
    response = client.getresponse()

    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == (
        'Bearer realm="zerowatch", Basic realm="zerowatch"'
    )
    assert b"zerowatch_" not in response.read()
    client.close()


def test_every_page_but_the_health_page_needs_the_token(make_server, token_file):
    address = make_server(auth_token_file=token_file, targets=list).start()

    pages = {path: status(address, path=path) for path in ("/", "/metrics", "/targets", "/no")}

    assert set(pages.values()) == {401}
    assert status(address, path="/healthz") == 200


def test_a_changed_file_is_read_again(make_server, token_file):
    address = make_server(auth_token_file=token_file).start()
    assert status(address, f"Bearer {TOKEN}") == 200

    replacement = token_file.with_name("new")
    replacement.write_text("another\n")
    os.replace(replacement, token_file)

    assert status(address, f"Bearer {TOKEN}") == 401
    assert status(address, "Bearer another") == 200


@pytest.mark.parametrize("fault", ["missing", "empty"])
def test_while_its_file_is_unusable_nobody_is_admitted(make_server, token_file, caplog, fault):
    address = make_server(auth_token_file=token_file).start()
    if fault == "missing":
        token_file.unlink()
    else:
        token_file.write_text("\n")

    refused = [status(address, f"Bearer {secret}") for secret in (TOKEN, "", " ")]
    token_file.write_text(TOKEN)

    assert refused == [401, 401, 401]
    assert status(address, f"Bearer {TOKEN}") == 200
    [record] = caplog.records
    assert f"serve.auth_token_file: {'cannot read ' * (fault == 'missing')}" in record.message
    assert TOKEN not in record.message


def test_a_file_that_becomes_unusable_is_logged_each_time_once(token_file, caplog):
    auth = ClientAuth(ServeSettings(auth_token_file=token_file))
    numbers = []

    for content in ("", "", "a token", ""):
        token_file.write_text(content)
        assert not auth.admits("Bearer x")
        assert not auth.admits("Bearer x")
        numbers.append(len(caplog.records))

    assert numbers == [1, 1, 1, 2]


@pytest.mark.parametrize("setting", ["auth_token_file", "basic_auth_file"])
@pytest.mark.parametrize("content", [None, "\n"], ids=["missing", "empty"])
def test_a_file_without_a_secret_disables_serving_and_is_named(
    make_server, tmp_path, caplog, setting, content
):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)

    assert make_server(**{setting: file}).start() is None
    [record] = caplog.records
    assert f"serve.{setting}: " in record.message
    assert str(file) in record.message


def test_a_fifo_is_not_read(make_server, tmp_path, caplog):
    os.mkfifo(tmp_path / "fifo")

    assert make_server(auth_token_file=tmp_path / "fifo").start() is None
    assert "it is not a regular file" in caplog.text


def test_the_header_of_a_client_is_admitted(tmp_path):
    token, users = tmp_path / "token", tmp_path / "users"
    token.write_text("  secret \n")
    users.write_text("# team\nana:pass word\nbob:x\n")
    auth = ClientAuth(ServeSettings(auth_token_file=token, basic_auth_file=users))

    bearer, basic = authorization_header(token, users), authorization_header(None, users)

    assert authorization_header(None, None) is None
    assert bearer == "Bearer secret"
    assert auth.admits(bearer)
    assert basic == f"Basic {base64.b64encode(b'ana:pass word').decode()}"
    assert auth.admits(basic)


@pytest.mark.parametrize("content", [None, "", "no user\n"])
def test_a_file_without_a_user_is_named(tmp_path, content):
    users = tmp_path / "users"
    if content is not None:
        users.write_text(content)

    with pytest.raises(SettingsError, match=f"basic_auth_file: .*{users}"):
        authorization_header(None, users)
