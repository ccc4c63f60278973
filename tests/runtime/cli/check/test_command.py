"""Tests of the command `check`: the ranks that it starts, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed.run
from click.testing import CliRunner
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from zerowatch.__main__ import commands
from zerowatch.errors import CommandLineError
from zerowatch.runtime.cli.check.verdicts import Check, Finding, Job, ok

# Prints by libc, then the check's output.
PRINTS_IN_C = """
import ctypes
from zerowatch.runtime.cli.check.command import _stdout_kept_free
libc = ctypes.CDLL(None)
libc.printf(b"before\\n")
with _stdout_kept_free():
    libc.printf(b"NCCL version\\n")
print("{}")
"""


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


def launched(
    monkeypatch: pytest.MonkeyPatch, *options: str, codes: tuple[int, ...] = (0,)
) -> tuple[int, list[str]]:
    """The exit code of the command, and torchrun's command line, if the ranks have these codes."""
    lines: list[list[str]] = []

    def start(line: list[str]) -> None:
        lines.append(line)
        [folder] = (each.partition("=")[2] for each in line if each.startswith("--exit-file="))
        for rank, code in enumerate(codes):
            (Path(folder) / str(rank)).write_text(str(code))

    monkeypatch.setattr(torch.distributed.run, "main", start)
    done = CliRunner().invoke(commands, ["check", *options])
    if isinstance(done.exception, CommandLineError):
        raise done.exception
    return done.exit_code, [each for line in lines for each in line]


def test_the_ranks_of_one_host_start_with_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    code, line = launched(
        monkeypatch, "--nproc", "3", "--ds-config", "ds.json", "--strict", "--json"
    )

    assert code == 0
    assert line[:5] == [
        "--nproc-per-node=3",
        "--nnodes=1",
        "--standalone",
        "-m",
        "zerowatch.runtime.cli.check",
    ]
    assert line[6:] == ["--ds-config", "ds.json", "--strict", "--json"]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "16"},  # a pod of Kubeflow: its number, and that of all pods
        {"LOCAL_RANK": "0"},
    ],
)
def test_a_process_with_some_of_a_ranks_variables_starts_the_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    _, line = launched(monkeypatch, "--nproc", "8")

    assert line[0] == "--nproc-per-node=8"


def test_what_c_code_prints_is_no_part_of_the_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(job: Job) -> Iterator[Finding]:
        os.write(1, b"NCCL INFO Bootstrap\n")
        print("[INFO] of DeepSpeed")
        yield ok("done")

    check = Check(name="speed", limit_seconds=60, run=run)
    monkeypatch.setattr("zerowatch.runtime.cli.check.all_checks.CHECKS", (check,))

    done = CliRunner().invoke(commands, ["check", "--json"])
    os.write(1, b"after\n")

    assert json.loads(done.stdout)["findings"][0]["text"] == "done"
    assert capfd.readouterr() == ("after\n", "NCCL INFO Bootstrap\n")


def test_what_libc_buffers_for_a_pipe_is_no_part_of_the_output() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    done = subprocess.run(
        [sys.executable, "-c", PRINTS_IN_C],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.stdout == "before\n{}\n"
    assert done.stderr == "NCCL version\n"


@pytest.mark.parametrize(
    ("rank", "local_rank", "code"), [("0", "0", 1), ("1", "1", 0), ("8", "0", 1)]
)
def test_without_a_connection_only_the_printing_rank_of_a_host_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, rank: str, local_rank: str, code: int
) -> None:
    def fail(job: Job) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr("zerowatch.runtime.cli.check.between_ranks.Ranks", fail)
    monkeypatch.setattr("zerowatch.runtime.cli.check.all_checks.CHECKS", ())
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("WORLD_SIZE", "16")

    done = CliRunner().invoke(commands, ["check"])

    assert done.exit_code == code
    assert ("16 ranks did not connect" in " ".join(done.stdout.split())) == bool(code)


def test_several_hosts_meet_at_the_given_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _, line = launched(
        monkeypatch, "--nproc", "2", "--nnodes", "2", "--rdzv-endpoint", "host0:29400"
    )

    assert line[:6] == [
        "--nproc-per-node=2",
        "--nnodes=2",
        "--rdzv-endpoint=host0:29400",
        "--rdzv-backend=c10d",
        "--rdzv-id=zerowatch-check",
        "--rdzv-conf=join_timeout=300",
    ]
    with pytest.raises(CommandLineError, match=r"--nnodes 2 needs --rdzv-endpoint"):
        launched(monkeypatch, "--nproc", "2", "--nnodes", "2")
    with pytest.raises(CommandLineError, match=r"--rdzv-endpoint: The port number .*'host0:port'"):
        launched(monkeypatch, "--nproc", "2", "--nnodes", "2", "--rdzv-endpoint", "host0:port")


@pytest.mark.parametrize(("codes", "code"), [((0, 1, 0), 1), ((0, 0), 0), ((), 1)])
def test_the_exit_code_is_the_highest_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], code: int
) -> None:
    assert launched(monkeypatch, "--nproc", "3", codes=codes)[0] == code


@pytest.mark.parametrize(("cores", "threads"), [(8.5, "2"), (2.0, "1")])
def test_the_cores_are_divided_among_the_ranks(
    monkeypatch: pytest.MonkeyPatch, cores: float, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("zerowatch.runtime.devices.cpu.usable_cores", lambda: cores)

    launched(monkeypatch, "--nproc", "4")

    assert os.environ.pop("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            ChildFailedError("job", {0: ProcessFailure(0, 7, -9, "")}),
            1,
            "zerowatch: check: a rank ended with status -9 before it was done\n",
        ),
        (SignalException("stopped", signal.SIGTERM), 143, ""),
    ],
)
def test_a_rank_that_ends_early_and_a_signal_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def fail(line: list[str]) -> None:
        raise error

    monkeypatch.setattr(torch.distributed.run, "main", fail)

    done = CliRunner().invoke(commands, ["check", "--nproc", "2"])

    assert (done.exit_code, done.stderr) == (code, said)


def refused() -> RendezvousConnectionError:
    """As torch raises it: only the cause says why."""
    error = RendezvousConnectionError("See inner exception for details.")
    error.__cause__ = DistNetworkError("The client socket has timed out.")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (refused(), "The client socket has timed out. "),
        (RendezvousTimeoutError(), "fewer than 2 hosts have come within 300 s. "),
        (RendezvousClosedError(), "RendezvousClosedError. "),
        (DistStoreError("wait timeout"), "wait timeout. "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hosts_that_do_not_meet_are_one_line_with_the_address(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(line: list[str]) -> None:
        raise error

    monkeypatch.setattr(torch.distributed.run, "main", fail)
    options = ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "host0:29400")

    done = CliRunner().invoke(commands, ["check", *options])

    assert done.exit_code == 1
    assert f"at host0:29400 (--rdzv-endpoint): {said}" in done.stderr
    assert done.stderr.startswith("zerowatch: check: ") and done.stderr.count("\n") == 1
