"""Two hosts joined by a link of a chosen bandwidth, made of network namespaces on this machine.

Needs root and iproute2. The link is a pair of virtual devices, each throttled by the kernel's token
bucket (tc-tbf(8)). Each host can also have a line of its own to this machine, which is never
throttled: monitoring goes over that. A single host has its loopback device as the link.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST = "64kb"  # what may pass at once above the rate; little compared with a bucket of gradients
QUEUE = "100ms"


def missing() -> str | None:
    """Return why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found: install iproute2"
    probe = f"zw{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    """One end of the link.

    Attributes:
        management_address: Where this machine reaches the host, past the link; None if not at all.
    """

    namespace: str
    device: str
    address: str
    management_address: str | None = None

    def command(self, *command: object) -> list[str]:
        """Return a command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]

    def sent_bytes(self) -> int:
        """Bytes that have left through the link, headers of the packets included."""
        path = Path("/sys/class/net", self.device, "statistics/tx_bytes")
        read = subprocess.run(self.command("cat", path), capture_output=True, text=True, check=True)
        return int(read.stdout)


@contextmanager
def two_hosts(
    rate: str | None, *, managed: bool = False, number: int = 0
) -> Iterator[Sequence[Host]]:
    """Create the hosts, and remove them at the end.

    Args:
        rate: The link's bandwidth as tc spells it, such as "200mbit"; None leaves it fast.
        managed: Whether each host gets its own line to this machine.
        number: From 0 to 99; pairs of hosts at the same time need different ones.
    """
    prefix = f"zw{os.getpid()}r{number}"
    hosts = [
        Host(
            namespace=f"{prefix}n{n}",
            device=f"{prefix}e{n}",
            address=f"10.77.0.{n + 1}",
            management_address=f"10.77.{2 * number + n + 1}.2" if managed else None,
        )
        for n in (0, 1)
    ]
    with ExitStack() as undo:
        for host in hosts:
            run_tool("ip", "netns", "add", host.namespace)
            undo.callback(run_tool, "ip", "netns", "del", host.namespace)
            run_tool("ip", "-n", host.namespace, "link", "set", "lo", "up")
        first, second = hosts
        run_tool("ip", "link", "add", first.device, "type", "veth", "peer", "name", second.device)
        for host in hosts:
            set_up_device(host, host.device, f"{host.address}/24")
        for n, host in enumerate(hosts):
            if host.management_address is not None:
                _manage(host, here=f"{prefix}m{n}", there=f"{prefix}c{n}")
        if rate is not None:
            throttle(hosts, rate)
        yield hosts


@contextmanager
def one_host(number: int = 99) -> Iterator[Host]:
    """Create a host with a line to this machine, and remove it at the end.

    Its ranks reach each other over its loopback device.

    Args:
        number: From 0 to 99; a number that no managed hosts have at the same time.
    """
    prefix = f"zw{os.getpid()}r{number}"
    host = Host(
        namespace=f"{prefix}n0",
        device="lo",
        address="127.0.0.1",
        management_address=f"10.77.{2 * number + 1}.2",
    )
    with ExitStack() as undo:
        run_tool("ip", "netns", "add", host.namespace)
        undo.callback(run_tool, "ip", "netns", "del", host.namespace)
        # By default a packet is larger than what the throttle lets pass at once.
        run_tool("ip", "-n", host.namespace, "link", "set", "lo", "mtu", "1500", "up")
        _manage(host, here=f"{prefix}m0", there=f"{prefix}c0")
        yield host


def throttle(hosts: Sequence[Host], rate: str | None) -> None:
    """Change the link's bandwidth, also while programs run on it; None takes the throttle away.

    Args:
        hosts: All ends; only what a host sends is throttled.
        rate: The bandwidth as tc spells it.
    """
    for host in hosts:
        queue = ("dev", host.device, "root")
        if rate is None:
            run_tool(*host.command("tc", "qdisc", "del", *queue))
        else:
            shape = ("rate", rate, "burst", BURST, "latency", QUEUE)
            run_tool(*host.command("tc", "qdisc", "replace", *queue, "tbf", *shape))


def cut(host: Host) -> None:
    """Take a host off the link. Nothing closes its connections: the other host waits for it."""
    run_tool(*host.command("ip", "link", "set", host.device, "down"))


def reconnect(host: Host) -> None:
    """Undo `cut`."""
    run_tool(*host.command("ip", "link", "set", host.device, "up"))


def run_on_both(
    hosts: Sequence[Host],
    command: Sequence[object],
    environment: dict[str, str],
    timeout_seconds: float,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the same command as one rank on each host; return how each ended."""
    with ExitStack() as undo:
        running = []
        for rank, host in enumerate(hosts):
            process = subprocess.Popen(
                host.command(*command),
                env=environment | place_of(rank, hosts),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            undo.callback(process.kill)
            running.append(process)
        ended = []
        for process in running:
            out, error = process.communicate(timeout=timeout_seconds)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
        return ended


def place_of(rank: int, hosts: Sequence[Host], port: int = 29577) -> dict[str, str]:
    """Return a rank's launcher variables; `port` is that of the rendezvous.

    Nobody else is in the namespaces, so that any port is free but another such job's.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": hosts[rank].device,
    }


def _manage(host: Host, *, here: str, there: str) -> None:
    """Connect this machine with the host; the device is removed with the namespace."""
    address = str(host.management_address)
    gateway = address.removesuffix(".2") + ".1"
    run_tool("ip", "link", "add", here, "type", "veth", "peer", "name", there)
    set_up_device(host, there, f"{address}/30")
    run_tool("ip", "addr", "add", f"{gateway}/30", "dev", here)
    run_tool("ip", "link", "set", here, "up")


def set_up_device(host: Host, device: str, address: str) -> None:
    """Move a device to the host's namespace and set its address."""
    inside = ("ip", "-n", host.namespace)
    run_tool("ip", "link", "set", device, "netns", host.namespace)
    run_tool(*inside, "addr", "add", address, "dev", device)
    run_tool(*inside, "link", "set", device, "up")


def run_tool(*command: object) -> None:
    """Run a command; raise a CalledProcessError if it fails."""
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
