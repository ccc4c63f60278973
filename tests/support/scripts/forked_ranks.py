"""Starts the ranks of a test job as torchrun does, but forks them from a process with the imports.

On two cores imports take most of a short job: 6 s of each rank, and 2 s of torchrun.
Tests of a job's start or launcher use `launching.start`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from scripts.launching import (
    ABORTED,
    SCRIPTS,
    TIMEOUT_SECONDS,
    Finished,
    clean,
    environment,
)
from servers.free_port import free_port

GRACE_SECONDS = 30.0
# Within this time a rank that hangs prints its stacks; one that exits may have no Python any more.
STACKS_SECONDS = 2.0


def start_ranks(
    num: int,
    *command: object,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    first_server: int = 0,
) -> Finished:
    """Run `python COMMAND` on `num` ranks to its end; the output is in order of ranks.

    Repeats the job once if torch aborts at exit, as `launching.start` does. Jobs that run at the
    same time need servers of their own.
    """
    before = set(cwd.iterdir())
    options: dict[str, Any] = {"cwd": cwd, "variables": variables, "first_server": first_server}
    done = _joined(fork_ranks(num, *command, **options))
    if done.returncode == 0 or ABORTED not in done.stderr:
        return done
    clean(cwd, before)
    return _joined(fork_ranks(num, *command, **options))


def fork_ranks(
    num: int,
    *command: object,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    first_server: int = 0,
) -> list[Finished]:
    """Run `python COMMAND` on each rank: a script, or `-m` and a module, with their arguments.

    Once a rank has failed, the others have `grace_seconds` to end.
    """
    options: dict[str, Any] = {"cwd": cwd, "variables": variables, "first_server": first_server}
    with running_ranks(num, *command, **options) as ranks:
        return ranks.join(grace_seconds)


@contextmanager
def running_ranks(
    num: int,
    *command: object,
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    first_server: int = 0,
) -> Iterator[RunningRanks]:
    """Start `python COMMAND` on each rank; ranks that are left at the end are killed."""
    words, port = [str(part) for part in command], free_port()
    with tempfile.TemporaryDirectory(prefix="zerowatch-ranks-") as name:
        streams = [
            {stream: Path(name, f"{stream}-{rank}") for stream in ("stdout", "stderr")}
            for rank in range(num)
        ]
        servers = [_server(first_server + rank) for rank in range(num)]
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
            ranks = RunningRanks(words, servers, streams)
            yield ranks
            ranks.kill()
        except BaseException:  # an interrupt, too, leaves answers that nobody waits for any more
            for server in servers:
                server.kill()
            _server.cache_clear()
            raise


class RunningRanks:
    """The ranks of a job that runs, as long as nobody has started another one.

    Attributes:
        pids: Process ids, by rank.
    """

    def __init__(
        self, words: list[str], servers: Sequence[_Server], streams: Sequence[Mapping[str, Path]]
    ) -> None:
        self.pids = [server.answer() for server in servers]
        self._words, self._servers, self._streams = words, servers, streams
        self._codes: dict[_Server, int] = {}

    def codes(self, timeout_seconds: float = 0.0) -> list[int | None]:
        """Return each rank's exit code, None if it runs; wait for the next one to end."""
        left = [server for server in self._servers if server not in self._codes]
        ready = select.select(left, [], [], timeout_seconds)[0] if left else []
        self._codes |= {server: server.answer() for server in ready}
        return [self._codes.get(server) for server in self._servers]

    def output(self) -> str:
        """Return what the ranks have printed so far, in order of ranks."""
        paths = [path for streams in self._streams for path in streams.values()]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def join(self, grace_seconds: float = GRACE_SECONDS) -> list[Finished]:
        """Wait for all ranks; kill those that are left at the deadline."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        codes = self.codes()
        while None in codes:
            if any(codes):
                deadline = min(deadline, time.monotonic() + grace_seconds)
            if time.monotonic() >= deadline:
                self._print_stacks()
                self.kill()
            codes = self.codes(max(0.0, deadline - time.monotonic()))
        return [
            Finished(
                self._words,
                code,
                **{stream: path.read_text(errors="replace") for stream, path in streams.items()},
            )
            for code, streams in zip(codes, self._streams, strict=True)
        ]

    def _print_stacks(self) -> None:
        """Let the ranks that are left print where they hang, to their error output."""
        for pid, code in zip(self.pids, self.codes(), strict=True):
            if code is None:
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(pid, signal.SIGUSR2)
        self.codes(STACKS_SECONDS)

    def kill(self) -> None:
        """Kill the ranks that are left."""
        for pid, code in zip(self.pids, self.codes(), strict=True):
            if code is None:
                with suppress(ProcessLookupError):  # it has ended just now
                    os.kill(pid, signal.SIGKILL)
        while None in self.codes(TIMEOUT_SECONDS):
            continue


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
