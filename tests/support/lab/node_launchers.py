"""Starts one job by `zerowatch run` on several hosts of `lab`, and kills hosts of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lab.two_hosts import Host
from scripts.launching import ZEROWATCH, environment

STORE_PORT = 29400
_STORE = """
import sys, time
from torch.distributed import TCPStore

store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("up", flush=True)
while True:
    time.sleep(3600)
"""
# A host as busy as a machine of tests starts its store late.
STORE_WAIT_SECONDS = 600


class NodeLaunchers:
    """The launchers of one job, one on each host.

    Args:
        folder: Of the outputs.
        hosts: The nodes of the job.
        store: Host of the rendezvous store. One that is not a node needs `start_store`.
        nodes: torchrun's `--nnodes`.
        script: Returns the script and its arguments on a host of this number.
        max_restarts: torchrun's `--max-restarts`.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        *,
        store: Host,
        nodes: str,
        script: Callable[[int], Sequence[object]],
        max_restarts: int = 3,
    ) -> None:
        self.hosts, self.store, self._folder = hosts, store, folder
        self._nodes, self._script, self._max_restarts = nodes, script, max_restarts
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._server: subprocess.Popen[bytes] | None = None

    def start_store(self) -> None:
        """Start the store, and wait until it listens."""
        command = self.store.command(sys.executable, "-c", _STORE, STORE_PORT)
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        self._server.stdout.readline()

    def start(self, number: int, program: Sequence[str] = (ZEROWATCH, "run")) -> None:
        """Start the launcher of a host; its output is appended to that of earlier ones."""
        host = self.hosts[number]
        is_store = int(host == self.store)
        command = host.command(
            *(*program, "--nnodes", self._nodes, "--nproc-per-node", 1),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.store.address}:{STORE_PORT}"),
            *("--rdzv-conf", f"is_host={is_store},read_timeout={STORE_WAIT_SECONDS}"),
            *("--rdzv-id", "job", "--local-addr", host.address),
            *("--max-restarts", self._max_restarts, *self._script(number)),
        )
        with self._output(number).open("a") as file:
            self._launchers[number] = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment(GLOO_SOCKET_IFNAME=host.device),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def output(self, number: int) -> str:
        """Return what the launchers of a host have printed, with the output of their ranks."""
        return self._output(number).read_text(errors="replace")

    def code(self, number: int) -> int | None:
        """Return the exit code of a host's launcher, or None while it runs."""
        return self._launchers[number].poll()

    def kill(self, number: int) -> None:
        """Kill every process of a host."""
        _kill_all(self.hosts[number])
        if number in self._launchers:
            self._launchers[number].wait()

    def kill_store(self) -> None:
        """Kill every process of the host of the store."""
        _kill_all(self.store)
        if self._server is not None:
            self._server.communicate()

    def close(self) -> None:
        """Kill all processes of the hosts. Safe to call twice."""
        for number in self._launchers:
            self.kill(number)
        self.kill_store()

    def _output(self, number: int) -> Path:
        return self._folder / f"output-{number}.txt"


def process_ids(host: Host) -> set[int]:
    """Return the processes of a host."""
    command = ["ip", "netns", "pids", host.namespace]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(map(int, listed.stdout.split()))


def _kill_all(host: Host) -> None:
    while processes := process_ids(host):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
