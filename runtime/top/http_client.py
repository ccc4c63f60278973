"""Reads pages of ranks and of Prometheus, with authorization and TLS."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from ...errors import SettingsError, ZerowatchError
from ...metrics.exporters.client_auth import authorization_header

# A rank answers within milliseconds. A screen should not wait longer for a host that is gone.
TIMEOUT_SECONDS = 4.0
MAX_BYTES = 16 * 2**20
# A rank waits at its end until regular clients have read that it is over, and distinguishes clients
# by this name: so the screen shows the last values.
USER_AGENT = "zerowatch-top"


class NoAnswerError(ZerowatchError):
    """A server did not answer, or not with the page. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of a server.

    Attributes:
        body: Its content.
        sent_at: Unix time at which it was sent, by the clock of the server; None if unknown.
    """

    body: bytes
    sent_at: float | None = None


Get = Callable[[str], Page]  # returns the page at a URL; raises NoAnswerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How servers are accessed. Nothing is needed for a run with the default settings.

    Attributes:
        token_file: File with a bearer token, as in `serve.auth_token_file`.
        basic_auth_file: File with a line `user:password`, as in `serve.basic_auth_file`.
        ca_file: PEM file of the authority of the servers' certificates; None for the system's.
        client_certificate: PEM file with a client's certificate and key.
    """

    token_file: Path | None = None
    basic_auth_file: Path | None = None
    ca_file: Path | None = None
    client_certificate: Path | None = None


class HttpClient:
    """Reads pages. Safe to use from several threads.

    Proxies of the environment are not used, and redirects are not followed: they could send the
    secret to another server.

    Args:
        access: Secrets and certificates.
        timeout_seconds: The longest wait for a connection, and for each part of an answer.

    Raises:
        SettingsError: A file cannot be read or is not what it should be.
    """

    def __init__(self, access: Access, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._access, self._timeout_seconds = access, timeout_seconds
        self._authorization()  # a missing file is an error at the start
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(context=_tls(access)),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)

    def get(self, url: str) -> Page:
        """Return a page.

        Raises:
            NoAnswerError: There is no answer, or it is an error.
        """
        request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT, **self._headers()})
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                body: bytes = response.read(MAX_BYTES + 1)
                num_missing: int = response.length or 0
                date = response.headers["Date"]
        except urllib.error.HTTPError as error:
            with error:
                raise NoAnswerError(_status_text(error.code)) from None
        except urllib.error.URLError as error:
            raise NoAnswerError(_reason(error.reason)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(_reason(error)) from None
        if len(body) > MAX_BYTES:
            raise NoAnswerError(f"more than {MAX_BYTES // 2**20} MiB")
        if num_missing:
            raise NoAnswerError(f"its answer was cut off, {num_missing} bytes are missing")
        return Page(body, _unix_seconds(date))

    def _headers(self) -> Mapping[str, str]:
        try:
            authorization = self._authorization()
        except SettingsError as error:  # the file was removed since
            raise NoAnswerError(str(error)) from None
        return {} if authorization is None else {"Authorization": authorization}

    def _authorization(self) -> str | None:
        return authorization_header(self._access.token_file, self._access.basic_auth_file)


def _tls(access: Access) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
        if access.client_certificate is not None:
            context.load_cert_chain(access.client_certificate)
    except (OSError, ssl.SSLError) as error:
        files = " or ".join(
            str(file) for file in (access.ca_file, access.client_certificate) if file is not None
        )
        raise SettingsError(
            f"cannot read certificates from {files} ({error.strerror or error}); give PEM files"
        ) from None
    return context


def _unix_seconds(date: str | None) -> float | None:
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def _status_text(status: int) -> str:
    if status in (401, 403):
        return f"refused with {status}; give --token-file or --basic-auth-file"
    if status == 404:
        return "another run, or another program, is at this address (404)"
    return f"answered with {status}"


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); give --ca-file"
    if isinstance(error, ssl.SSLError):
        return f"no TLS ({error.reason})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
