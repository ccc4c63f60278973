"""Tests of what is hidden of a configuration that is recorded or shown."""

from __future__ import annotations

from typing import Any

import pytest

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
