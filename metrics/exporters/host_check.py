"""Checks the header Host of requests, so that no web page of a foreign site reads this server.

A foreign site can give its own name the address of this machine (DNS rebinding). A browser then
regards this server as a part of that site, and lets the site's scripts read it. The browser sends
the site's name as Host, so the server refuses names that are not its own.

An IP address as Host is always accepted, because no name was resolved. So is a request without
Host, because every browser sends one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

# Both files are read without a query to a name server, which could delay the start.
HOSTS_FILE = Path("/etc/hosts")
RESOLVER_FILE = Path("/etc/resolv.conf")
_LOOPBACK = "localhost"


class HostCheck:
    """The names under which browsers may reach this server.

    Args:
        names: Names of this machine.
        allowed: More names, from the settings. A name that begins with "." allows all names that
            end with it. "*" allows every name.

    Examples:
        >>> check = HostCheck(names=("node7",), allowed=(".example.org",))
        >>> check.admits("localhost:9464"), check.admits("node7"), check.admits("runs.example.org")
        (True, True, True)
        >>> check.admits("attacker.example")
        False
    """

    def __init__(self, names: Iterable[str], allowed: Iterable[str] = ()) -> None:
        given = {_plain(name) for name in (*names, *allowed)} - {""}
        self._names = {name for name in given if not name.startswith(".")} | {_LOOPBACK}
        self._endings = (f".{_LOOPBACK}", *(name for name in given if name.startswith(".")))
        self._allows_all = "*" in given

    def admits(self, host: str) -> bool:
        """Whether a request with this header Host may be answered; the port does not matter."""
        name = _plain(_without_port(host))
        if not name or self._allows_all or name in self._names or name.endswith(self._endings):
            return True
        return _is_address(name)


def machine_names(
    hosts_file: Path = HOSTS_FILE, resolver_file: Path = RESOLVER_FILE
) -> frozenset[str]:
    """Return the names of this machine: its host name, with its aliases and its domains.

    Args:
        hosts_file: The names of addresses. Other names on a line with the host name are aliases.
        resolver_file: The settings of the resolver. Its domains are appended to the host name.
    """
    host = socket.gethostname().lower()
    short = host.partition(".")[0]
    names = {host, short}
    for _, *on_line in _fields(hosts_file):
        if not names.isdisjoint(name.lower() for name in on_line):
            names |= {name.lower() for name in on_line}
    for keyword, *domains in _fields(resolver_file):
        if keyword in ("search", "domain"):
            names |= {f"{short}.{domain.strip('.').lower()}" for domain in domains}
    return frozenset(names)


def _fields(file: Path) -> list[list[str]]:
    """Return the fields of the lines of a file; none if it cannot be read."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [fields for line in lines if (fields := line.partition("#")[0].split())]


def _without_port(host: str) -> str:
    host = host.strip()
    if host.startswith("["):  # an IPv6 address
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and ":" not in name else host


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
