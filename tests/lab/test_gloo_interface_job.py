"""Test of `gloo_interface.py`: hosts whose names resolve to 127.0.1.1 make a group of gloo."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab.two_hosts import Host, missing, two_hosts

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

SCRIPT = Path(__file__).parents[1] / "support/scripts/cross_rank/gloo_group_job.py"
LIMIT_SECONDS = 300


@pytest.fixture
def hosts() -> Iterator[Sequence[Host]]:
    with ExitStack() as undo:
        hosts = undo.enter_context(two_hosts(None))
        for host in hosts:  # `ip netns exec` puts the file in place of /etc/hosts
            folder = Path("/etc/netns", host.namespace)
            folder.mkdir(parents=True)
            undo.callback(shutil.rmtree, folder)
            names = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            (folder / "hosts").write_text(names)
        yield hosts


def test_hosts_whose_names_are_loopback_addresses_make_a_group(hosts: Sequence[Host]) -> None:
    environ = {**os.environ, "MASTER_ADDR": hosts[0].address, "LOCAL_WORLD_SIZE": "1"}
    environ.pop("GLOO_SOCKET_IFNAME", None)
    ranks = [
        subprocess.Popen(
            host.command(sys.executable, SCRIPT, rank),
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]

    assert outputs == ["sum: 3\n", "sum: 3\n"]
