"""Two hosts joined by a link of a chosen bandwidth, made of network namespaces on this machine.

Needs root and iproute2. The link is a pair of virtual devices, each throttled by the kernel's token
bucket (tc-tbf(8)).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST = "64kb"  # what may pass at once above the rate; little beside a bucket of gradients
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
    """One end of the link."""

    namespace: str
    device: str
    address: str

    def command(self, *command: object) -> list[str]:
        """Return a command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *map(str, command)]

    def sent_bytes(self) -> int:
        """Bytes that have left through the link, headers of the packets included."""
        path = Path("/sys/class/net", self.device, "statistics/tx_bytes")
        read = subprocess.run(self.command("cat", path), capture_output=True, text=True, check=True)
        return int(read.stdout)


@contextmanager
def two_hosts(rate: str | None) -> Iterator[Sequence[Host]]:
    """Make the hosts, and take them away again.

    Args:
        rate: The link's bandwidth as tc spells it, such as "200mbit"; None leaves it fast.
    """
    prefix = f"zw{os.getpid()}"
    hosts = [Host(f"{prefix}n{n}", f"{prefix}e{n}", f"10.77.0.{n + 1}") for n in (0, 1)]
    with ExitStack() as undo:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            undo.callback(_run, "ip", "netns", "del", host.namespace)
        first, second = hosts
        _run("ip", "link", "add", first.device, "type", "veth", "peer", "name", second.device)
        for host in hosts:
            _run("ip", "link", "set", host.device, "netns", host.namespace)
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.device)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", host.device, "up")
            if rate is not None:
                shape = ("rate", rate, "burst", BURST, "latency", QUEUE)
                _run(*host.command("tc", "qdisc", "add", "dev", host.device, "root", "tbf", *shape))
        yield hosts


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
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29577",  # nobody else is in the namespace
                "GLOO_SOCKET_IFNAME": host.device,
            }
            process = subprocess.Popen(
                host.command(*command),
                env=environment | place,
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


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
