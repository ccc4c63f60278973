"""Tests of the check of the header Host: which names a browser may use for the pages."""

from __future__ import annotations

import socket

import pytest
from fakes.scraper import get

from zerowatch.metrics.exporters.host_check import HostCheck, machine_names
from zerowatch.metrics.exporters.http_connection import Response

BROWSER = {"Accept_Language": "en"}


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:9464", "a.localhost:1", "127.0.0.1:9464", "10.1.2.3", "[::1]:80"),
        *("[fe80::1%25eth0]:80", "node7:9464", "Node7.", ""),
    ],
)
def test_names_of_the_machine_and_all_addresses_are_admitted(host):
    assert HostCheck(names=("node7",)).admits(host)


@pytest.mark.parametrize(
    "host",
    ["attacker.example", "localhost.attacker.example", "node7.attacker.example", "1.2.3.4.x"],
)
def test_other_names_are_refused(host):
    assert not HostCheck(names=("node7",)).admits(host)


def test_allowed_names_are_admitted_and_a_dot_allows_all_names_below_it():
    check = HostCheck(names=(), allowed=("proxy.example.org", ".lab.example"))

    admitted = [
        check.admits(host)
        for host in ("proxy.example.org:443", "a.b.lab.example", "lab.example", "x.example.org")
    ]

    assert admitted == [True, True, False, False]


def test_a_star_allows_every_name():
    assert HostCheck(names=(), allowed=("*",)).admits("anything.example")


def test_the_machine_has_the_aliases_and_domains_of_its_host_name(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text(
        "127.0.0.1 localhost\n127.0.1.1 node7.lab.example node7 # alias\n10.0.0.8 n8\n"
    )
    resolver.write_text("nameserver 10.0.0.1\nsearch cluster.example. example.org\n")

    names = machine_names(hosts, resolver)

    assert names == {"node7", "node7.lab.example", "node7.cluster.example", "node7.example.org"}


def test_without_the_files_the_machine_has_its_host_name(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.lab")

    assert machine_names(tmp_path / "none", tmp_path / "none") == {"node7", "node7.lab"}


@pytest.mark.parametrize("path", ["/", "/page", "/metrics", "/targets", "/healthz"])
def test_a_browser_that_uses_a_foreign_name_is_refused_on_every_page(make_server, path):
    address = make_server(targets=list, pages={"/page": lambda _: PAGE}).start()

    status, _, text = get(address, path, Host="attacker.example", **BROWSER)

    assert status == 403
    assert "serve.allowed_hosts" in text
    assert "zerowatch_" not in text


PAGE = Response(content_type="text/plain", body=b"a page")


def test_a_program_that_uses_a_foreign_name_is_refused_on_the_pages_only(make_server):
    address = make_server(targets=list, pages={"/page": lambda _: PAGE}).start()

    paths = ("/metrics", "/targets", "/healthz", "/", "/page")
    statuses = [get(address, path, Host="node7.of.dns:9464")[0] for path in paths]

    assert statuses == [200, 200, 200, 403, 403]


def test_the_advertised_and_the_allowed_names_are_admitted(make_server):
    names = {"advertise_host": "node7.of.dns", "allowed_hosts": ("a.proxy",)}
    port = make_server(**names).start().rpartition(":")[2]
    address = f"127.0.0.1:{port}"

    statuses = [get(address, "/", Host=host)[0] for host in ("node7.of.dns", "a.proxy", "b.proxy")]

    assert statuses == [200, 200, 403]


def test_allowed_hosts_are_separated_by_commas_in_the_environment(monkeypatch):
    from zerowatch.metrics.settings import load_settings

    monkeypatch.setenv("ZEROWATCH_SERVE_ALLOWED_HOSTS", "a.example, .b.example")

    assert load_settings().serve.allowed_hosts == ("a.example", ".b.example")
