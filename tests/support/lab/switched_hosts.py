"""Hosts on one switch, made of network namespaces on this machine. Needs root and iproute2.

The switch has a namespace of its own, so that any host can be lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from lab.two_hosts import Host, run_tool, set_up_device


@contextmanager
def switched_hosts(num: int) -> Iterator[Sequence[Host]]:
    """Create hosts with the addresses 10.77.0.1 and up, and remove them at the end."""
    prefix = f"zw{os.getpid()}s"
    switch = f"{prefix}w"
    hosts = [
        Host(namespace=f"{prefix}n{n}", device=f"{prefix}e{n}", address=f"10.77.0.{n + 1}")
        for n in range(num)
    ]
    with ExitStack() as undo:
        for namespace in (switch, *(host.namespace for host in hosts)):
            run_tool("ip", "netns", "add", namespace)
            undo.callback(run_tool, "ip", "netns", "del", namespace)
            run_tool("ip", "-n", namespace, "link", "set", "lo", "up")
        inside = ("ip", "-n", switch)
        run_tool(*inside, "link", "add", "bridge", "type", "bridge")
        run_tool(*inside, "link", "set", "bridge", "up")
        for n, host in enumerate(hosts):
            port = f"{prefix}p{n}"
            run_tool("ip", "link", "add", host.device, "type", "veth", "peer", "name", port)
            set_up_device(host, host.device, f"{host.address}/24")
            run_tool("ip", "link", "set", port, "netns", switch)
            run_tool(*inside, "link", "set", port, "master", "bridge", "up")
        yield hosts
