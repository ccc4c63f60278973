"""Starts the ranks of a test job as torchrun does, but forks them from a process with the imports.

On two cores imports take most of a short job: 6 s of each rank, and 2 s of torchrun.
Tests of a job's start or memory use `launching.start`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from scripts.launching import (
    ABORTED,
    SCRIPTS,
    TIMEOUT_SECONDS,
    Finished,
    clean,
    environment,
)

GRACE_SECONDS = 30.0


def start_ranks(
    num: int,
    *command: object,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run `python COMMAND` on `num` ranks to its end; the output is in order of ranks.

    Repeats the job once if torch aborts at exit, as `launching.start` does.
    """
    before = set(cwd.iterdir())
    done = _joined(fork_ranks(num, *command, cwd=cwd, variables=variables))
    if done.returncode == 0 or ABORTED not in done.stderr:
        return done
    clean(cwd, before)
    return _joined(fork_ranks(num, *command, cwd=cwd, variables=variables))


def fork_ranks(
    num: int,
    *command: object,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> list[Finished]:
    """Run `python COMMAND` on each rank: a script, or `-m` and a module, with their arguments.

    Once a rank has failed, the others have `grace_seconds` to end.
    """
    words, port = [str(part) for part in command], _free_port()
    with tempfile.TemporaryDirectory(prefix="zerowatch-ranks-") as name:
        streams = [
            {stream: Path(name, f"{stream}-{rank}") for stream in ("stdout", "stderr")}
            for rank in range(num)
        ]
        servers = [_server(rank) for rank in range(num)]
        for rank, server in enumerate(servers):
            server.fork(
                {
                    "command": words,
                    "cwd": str(cwd),
                    "environment": environment(**_place(rank, num, port), **(variables or {})),
                    **{stream: str(path) for stream, path in streams[rank].items()},
                }
            )
        try:
            pids = {server: server.answer() for server in servers}
            codes = _ends(pids, time.monotonic() + TIMEOUT_SECONDS, grace_seconds)
        except BaseException:  # an interrupt, too, leaves answers that nobody waits for any more
            for server in servers:
                server.kill()
            _server.cache_clear()
            raise
        return [
            Finished(
                words,
                codes[server],
                **{stream: path.read_text(errors="replace") for stream, path in each.items()},
            )
            for server, each in zip(servers, streams, strict=True)
        ]


def _ends(pids: Mapping[_Server, int], deadline: float, grace_seconds: float) -> dict[_Server, int]:
    """Wait for all ranks; kill those that are left at the deadline."""
    codes: dict[_Server, int] = {}
    while len(codes) < len(pids):
        left = [server for server in pids if server not in codes]
        ready, *_ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        for server in ready:
            codes[server] = server.answer()
            if codes[server]:
                deadline = min(deadline, time.monotonic() + grace_seconds)
        if not ready:
            for server in left:
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(pids[server], signal.SIGKILL)
            deadline += TIMEOUT_SECONDS
    return codes


def _joined(ranks: Sequence[Finished]) -> Finished:
    failed = [rank.returncode for rank in ranks if rank.returncode]
    return Finished(
        ranks[0].args,
        failed[0] if failed else 0,
        stdout="".join(rank.stdout for rank in ranks),
        stderr="".join(rank.stderr for rank in ranks),
    )


def _place(rank: int, num: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class _Server:
    """A `rank_server.py` process, which forks one rank of each job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SCRIPTS / "rank_server.py"],
            env=environment(),
            bufsize=0,  # else `select` would not see an answer that was read with the one before
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self._process.communicate)

    def fork(self, rank: Mapping[str, object]) -> None:
        """Request a rank; the previous one must have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(rank).encode() + b"\n")

    def kill(self) -> None:
        """Kill the server and the rank that it forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def answer(self) -> int:
        """Return the next answer: the process id of the requested rank, or its exit code."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            with suppress(ValueError):  # what DeepSpeed says as it is imported
                return int(line)
        raise RuntimeError("a rank server has ended; its traceback is above")

    def fileno(self) -> int:
        """Return the descriptor of the server's answers, for `select`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()


@cache
def _server(rank: int) -> _Server:
    return _Server()
