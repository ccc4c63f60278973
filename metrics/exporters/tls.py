"""The server's TLS context, from the files in the settings."""

from __future__ import annotations

import ssl
from pathlib import Path

from ...errors import SettingsError
from ..settings import ServeSettings


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """Build the server's TLS context, or None if TLS is not configured.

    Raises:
        SettingsError: A file cannot be read, or has the wrong content.
    """
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(context, certificate, key)
    if settings.tls_client_ca is not None:
        _load_client_authority(context, settings.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _check_readable("tls_certificate", certificate)
    _check_readable("tls_key", key)
    try:
        # Without a password OpenSSL would stop the training to ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise SettingsError(
            f"serve.tls_certificate {certificate} and serve.tls_key {key} cannot be used together "
            f"({error.reason}); give a PEM certificate and its own PEM key without a password"
        ) from None


def _load_client_authority(context: ssl.SSLContext, authority: Path) -> None:
    _check_readable("tls_client_ca", authority)
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise SettingsError(
            f"serve.tls_client_ca {authority} holds no certificate ({error.reason}); "
            "give the PEM file of the authority that signs the clients' certificates"
        ) from None


def _check_readable(setting: str, path: Path) -> None:
    """Raise an error with the file's name, which the ssl module omits."""
    try:
        path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"serve.{setting}: cannot read {path} ({error.strerror}); "
            "give a PEM file that this user may read"
        ) from None
