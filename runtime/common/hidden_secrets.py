"""Hides secrets in a configuration that is written into the run folder or shown."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from types import SimpleNamespace
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
# A name with a value that may be secret, as in "Namespace(api_key='abc')" and "{'api_key': 'abc'}".
_NAMED_TEXT = re.compile(
    r"(\w+)['\"]?\s*[=:](?!\s*(?:[-+]?[\d.]+(?:e[-+]?\d+)?|None|True|False)(?:[\s,)\]}]|$))"
)


def without_secrets(value: Any, *, is_secret: bool = False) -> Any:
    """Return a configuration with texts hidden that name or nature shows to be secret.

    Numbers, such as counts of tokens, are no secrets. Of an object whose text shows a secret, only
    the name of its type is returned.

    Args:
        value: Nested mappings, dataclasses, namespaces, lists and values.
        is_secret: Whether it stands under the name of a secret.

    Examples:
        >>> without_secrets({"comet": {"api_key": "abc"}, "max_tokens": 512})
        {'comet': {'api_key': '(not recorded)'}, 'max_tokens': 512}
    """
    fields = _fields_of(value)
    if fields is not None:
        return {
            str(name): without_secrets(each, is_secret=is_secret or _names_secret(str(name)))
            for name, each in fields.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(each, is_secret=is_secret) for each in value]
    if isinstance(value, str):
        return HIDDEN if is_secret and value else without_secret_parts(value)
    if value is None or isinstance(value, int | float):
        return value
    if hasattr(value, "item") or hasattr(value, "arrived"):  # tensors, arrays, PendingScalar
        return value
    text = str(value)
    if is_secret:
        return HIDDEN
    if any(_names_secret(name) for name in _NAMED_TEXT.findall(text)):
        return type(value).__name__
    shown = without_secret_parts(text)
    return value if shown == text else shown


def _fields_of(value: Any) -> Mapping[Any, Any] | None:
    """Return the named values that an object consists of; None if it does not consist of them."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return dict(zip(value._fields, value, strict=True))
    return None


def without_secret_parts(text: str) -> str:
    """Return a text without the user and password of a URL, and without a bearer token.

    Examples:
        >>> without_secret_parts("https://ann:pw@host/metrics")
        'https://(not recorded)@host/metrics'
    """
    return _SECRET_TEXT.sub(HIDDEN, text)


def _names_secret(name: str) -> bool:
    return not _SECRET_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))
