"""Tests of what is hidden of a configuration that is recorded or shown."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from zerowatch.runtime.common.device_scalar import PendingScalar
from zerowatch.runtime.common.hidden_secrets import without_secret_parts, without_secrets

HIDDEN = "(not recorded)"


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "apikey", "keys", "hubToken", "tokens", "secret", "clientSecrets", "password"),
        *("DB_PASSWORDS", "passwd", "passphrase", "pwd", "pass", "credential", "credentials"),
        *("auth", "cookie", "Authorization", "bearer", "GITHUB_PAT", "APIKey"),
    ],
)
def test_a_text_under_the_name_of_a_secret_is_hidden(name: str) -> None:
    assert without_secrets({name: "abc"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "config",
    [
        {"monkey": "a", "author": "b", "path": "c", "tokenizer": "gpt2", "passes": "d"},
        {"max_tokens": 512, "use_auth": True, "token": None, "password": ""},
        {"zero": {"stage": 2, "names": ["x", 1.5]}},
    ],
    ids=["similar names", "no texts", "nested"],
)
def test_what_is_no_secret_stays(config: dict[str, Any]) -> None:
    assert without_secrets(config) == config


def test_all_texts_below_the_name_of_a_secret_are_hidden() -> None:
    config = {"auth": {"user": "ann", "tries": 3, "old": ("one", ["two"])}, 7: {"user": "ann"}}

    assert without_secrets(config) == {
        "auth": {"user": HIDDEN, "tries": 3, "old": [HIDDEN, [HIDDEN]]},
        "7": {"user": "ann"},
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:pw@host/metrics", f"https://{HIDDEN}@host/metrics"),
        ("https://host/a@b", "https://host/a@b"),
        ("ann@host", "ann@host"),
        ("Authorization: Bearer abc.def next", f"Authorization: Bearer {HIDDEN} next"),
        ("basic YTpi", f"basic {HIDDEN}"),
        ("Basic YTpi, bearer xyz", f"Basic {HIDDEN} bearer {HIDDEN}"),
        ("forbearer abc", "forbearer abc"),
    ],
)
def test_the_secret_part_of_a_text_is_hidden(text: str, shown: str) -> None:
    assert without_secret_parts(text) == shown
    assert without_secrets({"endpoint": [text]}) == {"endpoint": [shown]}


@dataclasses.dataclass
class Login:
    user: str
    password: str
    nested: Any = None


class Access(NamedTuple):
    host: str
    token: str


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Login("ann", "s3cret"), {"user": "ann", "password": HIDDEN, "nested": None}),
        (argparse.Namespace(lr=0.1, api_key="s3cret"), {"lr": 0.1, "api_key": HIDDEN}),
        (SimpleNamespace(lr=0.1, api_key="s3cret"), {"lr": 0.1, "api_key": HIDDEN}),
        (Access("host", "s3cret"), {"host": "host", "token": HIDDEN}),
        (
            [Login("ann", "s3cret", {"inner": Login("bob", "s3cret")})],
            [
                {
                    "user": "ann",
                    "password": HIDDEN,
                    "nested": {"inner": {"user": "bob", "password": HIDDEN, "nested": None}},
                }
            ],
        ),
    ],
    ids=["dataclass", "Namespace", "SimpleNamespace", "named tuple", "nested"],
)
def test_the_fields_of_an_object_are_hidden_by_their_names(value: Any, shown: Any) -> None:
    assert without_secrets(value) == shown


@pytest.mark.parametrize(
    "secret", [{"s3cret"}, b"s3cret", Path("s3cret"), np.str_("s3cret"), ("s3cret",)], ids=repr
)
def test_another_object_under_the_name_of_a_secret_is_hidden(secret: Any) -> None:
    assert "s3cret" not in str(without_secrets({"hub_token": secret}))


class Shown:
    """An object with a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    "text",
    [
        "Config(api_key=123abc)",
        "Config(hub_token='s3cret')",
        "{'password': 's3cret'}",
        '{"a": {"password" : "s3cret"}}',
        "max_tokens=512 wandb_api_key=s3cret",
        "token=12-s3cret",
    ],
)
def test_an_object_whose_text_shows_a_secret_is_written_as_its_type(text: str) -> None:
    assert without_secrets([Shown(text)]) == ["Shown"]


def test_the_url_in_the_text_of_an_object_has_no_password() -> None:
    assert without_secrets([Shown("at https://ann:pw@host")]) == [f"at https://{HIDDEN}@host"]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(5),
        np.float32(2.0),
        Path("data"),
        1 + 2j,
        Login,
        Shown("Config(max_tokens= 512, lr=1e-4, token=None)"),
    ],
    ids=str,
)
def test_an_object_without_a_secret_stays_the_same(value: Any) -> None:
    assert without_secrets([value])[0] is value


class Pending:
    """Stands in for a PendingScalar, which only exists with a device."""

    arrived = PendingScalar.arrived


@pytest.mark.parametrize("tokens", [5, torch.tensor(5), np.int64(5), Pending()], ids=type)
def test_a_number_of_tokens_is_no_secret(tokens: Any) -> None:
    assert without_secrets({"num_tokens": tokens})["num_tokens"] is tokens
