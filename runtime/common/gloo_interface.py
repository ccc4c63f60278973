"""Chooses the network interface of gloo's groups in a job on several nodes.

Gloo binds to the address to which the host name resolves. On many hosts, such as Debian's, that is
127.0.1.1, which other nodes do not reach. NCCL searches for an interface by itself, so a job on
GPUs runs until its first group of gloo.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

VARIABLE = "GLOO_SOCKET_IFNAME"
# Launchers' names of the number of ranks on a node, and of a rank's number among them: torchrun,
# DeepSpeed, Open MPI.
_LOCAL_PLACES = {
    "LOCAL_WORLD_SIZE": "LOCAL_RANK",
    "LOCAL_SIZE": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
}
# Slurm's names of the number of nodes, of a step and of the job's allocation.
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
# An address that is on no network (RFC 5737). The route to it is the default route.
_ELSEWHERE = "192.0.2.1"


class LocalPlace(NamedTuple):
    """Place of a rank among the ranks of its node, from the variables of its launcher.

    Attributes:
        rank: The rank on its node, counted from 0.
        num_ranks: Number of ranks on the node; 1 if it is not known.
        is_known: Whether the launcher sets the number of ranks on the node.
    """

    rank: int = 0
    num_ranks: int = 1
    is_known: bool = False


def local_place(environ: Mapping[str, str]) -> LocalPlace:
    """Return the place of this rank on its node.

    Args:
        environ: The environment variables.
    """
    for size_name, rank_name in _LOCAL_PLACES.items():
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "0")
        if size.isdecimal() and rank.isdecimal() and int(rank) < int(size):
            return LocalPlace(int(rank), int(size), is_known=True)
    return LocalPlace()


def gloo_interface(
    environ: Mapping[str, str],
    world_size: int,
    interfaces: Mapping[str, Collection[str]],
    route: Callable[[str], str | None],
) -> str | None:
    """Return the interface for gloo, or None if gloo's own choice is as good.

    GLOO_SOCKET_IFNAME takes precedence, then NCCL_SOCKET_IFNAME, then the interface by which this
    node reaches MASTER_ADDR. On the master itself this may be the loopback interface. The interface
    of the default route is taken then.

    Args:
        environ: The environment variables.
        world_size: Ranks of the job.
        interfaces: The addresses of each interface of this host that is up.
        route: Returns the own address from which packets to an address are sent, or None.
    """
    place = local_place(environ)
    if VARIABLE in environ or (place.is_known and place.num_ranks == world_size):
        return None
    outside = {name: found for name, found in interfaces.items() if not all(map(_is_local, found))}
    wanted = environ.get("NCCL_SOCKET_IFNAME")
    if wanted:
        return next((name for name in outside if _nccl_accepts(name, wanted)), None)
    address = route(environ.get("MASTER_ADDR", "localhost"))
    if address is not None and _is_local(address):
        # Without a known number of local ranks or nodes, this may be a job on a single node.
        several_nodes = place.is_known or _num_nodes(environ) > 1
        address = route(_ELSEWHERE) if several_nodes else None
    return next((name for name, found in outside.items() if address in found), None)


@contextmanager
def gloo_interface_chosen(world_size: int) -> Iterator[None]:
    """Set GLOO_SOCKET_IFNAME while a group is made, if it is unset and the job has several nodes.

    Args:
        world_size: Ranks of the job.
    """
    interface = gloo_interface(os.environ, world_size, _interfaces(), _own_address)
    if interface is None:
        yield
        return
    logger.info("gloo uses the interface %s; set %s to choose another", interface, VARIABLE)
    os.environ[VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def _interfaces() -> dict[str, list[str]]:
    statuses = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address.partition("%")[0] for each in found if each.family in families]
        for name, found in psutil.net_if_addrs().items()
        if name in statuses and statuses[name].isup
    }


def _own_address(destination: str) -> str | None:
    """Return the own address from which packets to a host are sent. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _num_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes by Slurm's variables; 1 without them."""
    found = next((environ[name] for name in _NUM_NODES if name in environ), "1")
    return int(found) if found.isdecimal() else 1


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _nccl_accepts(name: str, wanted: str) -> bool:
    """Return whether NCCL would use an interface, by the syntax of NCCL_SOCKET_IFNAME.

    The value is a list of prefixes. `^` excludes them, `=` asks for whole names.
    """
    excludes = wanted.startswith("^")
    is_exact = wanted.removeprefix("^").startswith("=")
    listed = wanted.removeprefix("^").removeprefix("=").split(",")
    matches = name in listed if is_exact else any(name.startswith(each) for each in listed if each)
    return matches != excludes
