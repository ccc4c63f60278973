"""Hides secrets in a configuration that is written into the run folder or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not recorded)"
# A name that has one of these words names a secret, such as "api_key", "hubToken" and "auth".
_SECRET_WORDS = frozenset(
    [
        *("key", "keys", "apikey", "token", "tokens", "secret", "secrets", "password", "passwords"),
        *("passwd", "passphrase", "pwd", "pass", "credential", "credentials", "auth", "cookie"),
        *("authorization", "bearer", "pat"),
    ]
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# The user and password of a URL, and the header of an authorization.
_SECRET_TEXT = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=\b[Bb]earer )\S+|(?<=\b[Bb]asic )\S+")


def without_secrets(value: Any, *, is_secret: bool = False) -> Any:
    """Return a configuration with texts hidden that name or nature shows to be secret.

    Numbers, such as counts of tokens, are no secrets.

    Args:
        value: Nested mappings, lists and values.
        is_secret: Whether it stands under the name of a secret.

    Examples:
        >>> without_secrets({"comet": {"api_key": "abc"}, "max_tokens": 512})
        {'comet': {'api_key': '(not recorded)'}, 'max_tokens': 512}
    """
    if isinstance(value, Mapping):
        return {
            str(name): without_secrets(each, is_secret=is_secret or _names_secret(str(name)))
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(each, is_secret=is_secret) for each in value]
    if isinstance(value, str):
        return HIDDEN if is_secret and value else without_secret_parts(value)
    return value


def without_secret_parts(text: str) -> str:
    """Return a text without the user and password of a URL, and without a bearer token.

    Examples:
        >>> without_secret_parts("https://ann:pw@host/metrics")
        'https://(not recorded)@host/metrics'
    """
    return _SECRET_TEXT.sub(HIDDEN, text)


def _names_secret(name: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))
