"""Checks the bearer token or the user and password of a client against a file.

The secrets are in files, as environment variables are visible in process lists and crash dumps. A
file is read again when it changes, so a secret can be replaced while the run goes on.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Callable
from pathlib import Path

from ...errors import SettingsError
from ..atomic_file import regular_file_status
from ..settings import ServeSettings

logger = logging.getLogger(__name__)

# The realm in the header WWW-Authenticate.
REALM = "zerowatch"


def authorization_header(token_file: Path | None, basic_auth_file: Path | None) -> str | None:
    """Return the header Authorization with which a client is admitted; None without a file.

    The files are those of `serve.auth_token_file` and `serve.basic_auth_file`. Of several users the
    first is taken, and a token comes before users.

    Raises:
        SettingsError: A file cannot be read, or contains no secret.
    """
    if token_file is not None:
        _, secrets = _read_secrets("auth_token_file", token_file, _token)
        return f"Bearer {secrets[0].decode('latin-1')}"
    if basic_auth_file is not None:
        _, secrets = _read_secrets("basic_auth_file", basic_auth_file, _users)
        return f"Basic {base64.b64encode(secrets[0]).decode()}"
    return None


def file_version(path: Path) -> tuple[int, ...]:
    """Return figures that differ after a change. Kubernetes replaces a link to the file.

    Raises:
        OSError: There is no such regular file, or it is not accessible.
    """
    status = regular_file_status(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


class ClientAuth:
    """The clients that may read the metrics. Without a secret file, everybody may.

    Args:
        settings: The files with the secrets.

    Raises:
        SettingsError: A file cannot be read, or contains no secret.
    """

    def __init__(self, settings: ServeSettings) -> None:
        files = {
            "Bearer": ("auth_token_file", settings.auth_token_file, _token),
            "Basic": ("basic_auth_file", settings.basic_auth_file, _users),
        }
        self._schemes = {
            scheme: _SecretFile(setting, path, parse)
            for scheme, (setting, path, parse) in files.items()
            if path is not None
        }

    @property
    def is_required(self) -> bool:
        """Whether a client needs a token, or a user and a password."""
        return bool(self._schemes)

    @property
    def challenge(self) -> str:
        """The header WWW-Authenticate of a refusal."""
        return ", ".join(f'{scheme} realm="{REALM}"' for scheme in self._schemes)

    def admits(self, authorization: str) -> bool:
        """Whether a client with this header Authorization may read the metrics."""
        if not self._schemes:
            return True
        name, _, credentials = authorization.partition(" ")
        file = self._schemes.get(name.capitalize())
        if file is None:
            return False
        given = credentials.strip().encode("latin-1", "replace")
        if name.capitalize() == "Basic":
            given = _decoded(given)
        digest = _digest(given)
        # All secrets are compared, each in constant time: the duration shows nothing about them.
        return any([hmac.compare_digest(digest, secret) for secret in file.digests()])


class _SecretFile:
    """The digests of a file's secrets, read again when the file changes."""

    def __init__(self, setting: str, path: Path, parse: Callable[[bytes], list[bytes]]) -> None:
        self._setting, self._path, self._parse = setting, path, parse
        self._is_logged = False
        self._version: tuple[int, ...] | None = None
        self._digests: list[bytes] = []
        self._read()

    def digests(self) -> list[bytes]:
        """Return the digests. Without a usable file there are none, so nobody is admitted."""
        try:
            self._read()
        except SettingsError as error:
            if not self._is_logged:
                self._is_logged = True
                logger.error("all scrapes are refused until it is corrected: %s", error)
            self._version, self._digests = None, []
        else:
            self._is_logged = False
        return self._digests

    def _read(self) -> None:
        """Read the file if it has changed since the last call."""
        version, secrets = _read_secrets(self._setting, self._path, self._parse, self._version)
        if version != self._version:
            self._version, self._digests = version, [_digest(secret) for secret in secrets]


def _read_secrets(
    setting: str,
    path: Path,
    parse: Callable[[bytes], list[bytes]],
    known: tuple[int, ...] | None = None,
) -> tuple[tuple[int, ...], list[bytes]]:
    """Return the version of a file and its secrets; no secrets if its version is known.

    Raises:
        SettingsError: The file cannot be read, or contains no secret.
    """
    try:
        version = file_version(path)
        if version == known:
            return version, []
        secrets = parse(path.read_bytes())
    except OSError as error:
        raise _file_error(setting, f"cannot read {path} ({error.strerror})") from None
    if not secrets:
        raise _file_error(setting, f"{path} contains none")
    return version, secrets


def _file_error(setting: str, fault: str) -> SettingsError:
    content = "one line user:password per user" if "basic" in setting else "the token"
    return SettingsError(
        f"serve.{setting}: {fault}; give a file that this user may read, with {content}"
    )


def _token(content: bytes) -> list[bytes]:
    token = content.strip()
    return [token] if token else []


def _users(content: bytes) -> list[bytes]:
    lines = [line.strip() for line in content.splitlines()]
    return [line for line in lines if b":" in line and not line.startswith(b"#")]


def _decoded(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True)
    except binascii.Error:
        return b""


def _digest(secret: bytes) -> bytes:
    """Return a digest, so that all compared values have the same length."""
    return hashlib.sha256(secret).digest()
