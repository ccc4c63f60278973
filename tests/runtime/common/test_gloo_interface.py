"""Tests of the network interface that gloo's groups use in a job on several nodes."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common import gloo_interface as module
from zerowatch.runtime.common.gloo_interface import (
    LocalPlace,
    gloo_interface,
    gloo_interface_chosen,
    local_place,
)
from zerowatch.runtime.common.host_group import new_host_group

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eno1": ["10.0.0.5"],
    "ib0": ["10.1.0.5", "fe80::1"],
    "down": [],
}
TWO_NODES = {"LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node-0"}
ROUTES = {"node-0": "10.1.0.5", "10.0.0.4": "10.0.0.5", "192.0.2.1": "10.0.0.5"}


def chosen(routes: dict[str, str] | None = None, **environ: str) -> str | None:
    return gloo_interface({**TWO_NODES, **environ}, 16, INTERFACES, (ROUTES | (routes or {})).get)


def test_a_job_on_several_nodes_uses_the_interface_by_which_the_master_is_reached() -> None:
    assert chosen() == "ib0"
    assert chosen(MASTER_ADDR="10.0.0.4") == "eno1"


def test_the_master_itself_uses_the_default_route_if_its_name_is_a_loopback_address() -> None:
    assert chosen({"node-0": "127.0.1.1"}) == "eno1"


def test_an_interface_that_the_user_names_is_kept() -> None:
    assert chosen(GLOO_SOCKET_IFNAME="docker0") is None


@pytest.mark.parametrize(
    ("wanted", "interface"),
    [
        ("eno", "eno1"),
        ("ib,eno", "eno1"),
        ("=ib0", "ib0"),
        ("=ib", None),
        ("^docker,eno", "ib0"),
        ("^=docker0", "eno1"),
        ("lo", None),
    ],
)
def test_the_interface_of_nccl_comes_first(wanted: str, interface: str | None) -> None:
    assert chosen(NCCL_SOCKET_IFNAME=wanted) == interface


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_on_a_single_node_gloo_chooses_itself(name: str) -> None:
    environ = {name: "16", "MASTER_ADDR": "node-0", "NCCL_SOCKET_IFNAME": "eno"}

    assert gloo_interface(environ, 16, INTERFACES, ROUTES.get) is None


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, LocalPlace(3, 8, is_known=True)),
        ({"LOCAL_RANK": "3", "LOCAL_SIZE": "8"}, LocalPlace(3, 8, is_known=True)),
        (
            # A wrapper that shows each rank one GPU sets LOCAL_RANK to 0.
            {
                "LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
            },
            LocalPlace(3, 8, is_known=True),
        ),
        ({"LOCAL_WORLD_SIZE": "8"}, LocalPlace(0, 8, is_known=True)),
        ({"LOCAL_RANK": "3"}, LocalPlace()),
        ({"LOCAL_WORLD_SIZE": ""}, LocalPlace()),
        ({"LOCAL_WORLD_SIZE": "0"}, LocalPlace()),
        ({}, LocalPlace(0, 1, is_known=False)),
    ],
)
def test_the_place_of_a_rank_on_its_node_is_that_of_its_launcher(
    environ: dict[str, str], place: LocalPlace
) -> None:
    assert local_place(environ) == place


def test_without_the_number_of_local_ranks_a_local_master_means_a_single_node() -> None:
    routes = {"localhost": "127.0.0.1", "192.0.2.1": "10.0.0.5"}

    assert gloo_interface({}, 16, INTERFACES, routes.get) is None


@pytest.mark.parametrize(
    ("variables", "interface"),
    [
        ({"SLURM_NNODES": "2"}, "eno1"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "eno1"),
        ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}, None),
        ({"SLURM_NNODES": "1"}, None),
        ({"SLURM_NNODES": "2(x2)"}, None),
        ({"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "2"}, None),
    ],
)
def test_under_srun_the_number_of_nodes_shows_whether_a_local_master_is_reached_by_others(
    variables: dict[str, str], interface: str | None
) -> None:
    routes = ROUTES | {"node-0": "127.0.1.1"}

    chosen = gloo_interface({"MASTER_ADDR": "node-0", **variables}, 16, INTERFACES, routes.get)

    assert chosen == interface


def test_without_a_route_gloo_chooses_itself() -> None:
    assert chosen(MASTER_ADDR="unknown") is None


def test_the_variable_is_set_only_while_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(module, "_interfaces", lambda: INTERFACES)
    monkeypatch.setattr(module, "_own_address", ROUTES.get)
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)

    with gloo_interface_chosen(16):
        during = os.environ["GLOO_SOCKET_IFNAME"]

    assert during == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_group_that_cannot_be_made_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed: Connection refused")

    monkeypatch.setattr(dist, "new_group", fail)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)

    with pytest.raises(ZerowatchError, match=r"connectFullMesh.*GLOO_SOCKET_IFNAME"):
        new_host_group()


def test_this_machine_s_interfaces_and_routes_are_found() -> None:
    interfaces = module._interfaces()

    assert any("127.0.0.1" in addresses for addresses in interfaces.values())
    assert module._own_address("127.0.0.1") == "127.0.0.1"
    assert module._own_address("no such host.invalid") is None


def test_a_job_on_one_node_sets_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")

    with gloo_interface_chosen(16):
        assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_variable_is_unset_after_a_group_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(module, "gloo_interface", lambda *_: "ib0")

    with pytest.raises(RuntimeError), gloo_interface_chosen(16):
        raise RuntimeError

    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_only_addresses_of_interfaces_that_are_up_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def address(text: str, family: int) -> SimpleNamespace:
        return SimpleNamespace(address=text, family=family)

    found = {
        "up": [
            address("10.0.0.5", socket.AF_INET),
            address("fe80::1%up", socket.AF_INET6),
            address("02:42:ac:11:00:02", psutil.AF_LINK),
        ],
        "down": [address("10.0.0.6", socket.AF_INET)],
        "unknown": [address("10.0.0.7", socket.AF_INET)],
    }
    states = {"up": SimpleNamespace(isup=True), "down": SimpleNamespace(isup=False)}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(module.psutil, "net_if_stats", lambda: states)

    assert module._interfaces() == {"up": ["10.0.0.5", "fe80::1"]}
