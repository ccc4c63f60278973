"""Runs the command `check`: machine, software and configuration, before a run."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NoReturn

import click

from ....errors import CommandLineError

_CLOSE_SECONDS = 30
# The command is started on each host by hand.
_JOIN_SECONDS = 300
_HELP_NPROC = (
    "Ranks to start on this host, to check clocks and links too.  [default: one process, which "
    "checks this host only]"
)


@click.command(short_help="Check machine, software and configuration before a run.")
@click.option("--ds-config", metavar="DS_JSON", help="DeepSpeed configuration of the run.")
@click.option("--nproc", type=click.IntRange(min=1), help=_HELP_NPROC)
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts of the job."
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="With --nnodes: where the hosts meet, as in torchrun; run the command on each host.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--exit-file", hidden=True)
def check(
    ds_config: str | None,
    nproc: int | None,
    nnodes: int,
    rdzv_endpoint: str | None,
    strict: bool,
    as_json: bool,
    exit_file: str | None,
) -> None:
    """Check machine, software and configuration before a run.

    Prints a verdict for each check, and what to do: ok, warning (the run works, but is slower or
    loses something), failed (the run does not start, waits forever, or fails later), or not
    applicable. Each check is bounded in time. Nothing is changed.

    Under a launcher that sets RANK, LOCAL_RANK and WORLD_SIZE, all ranks check together, and rank 0
    prints.

    \b
    Examples:
        zerowatch check --ds-config ds.json
        zerowatch check --nproc 8
        zerowatch check --nproc 8 --nnodes 2 --rdzv-endpoint host0:29400   (on both hosts)
        srun torchrun ... --no-python zerowatch check

    Exit code: 0, or 1 if a check failed.
    """  # noqa: D301  # click needs the character, not a raw string
    from .all_checks import is_rank

    if nproc is not None and not is_rank(os.environ):
        sys.exit(_launch(nproc, nnodes, rdzv_endpoint, _options(ds_config, strict, as_json)))
    _exit(_check(ds_config, nproc, strict, as_json), exit_file)


@dataclass(frozen=True, slots=True)
class _Result:
    code: int
    has_hung: bool  # a thread of a check still runs


def _options(ds_config: str | None, strict: bool, as_json: bool) -> list[str]:
    given = [] if ds_config is None else ["--ds-config", ds_config]
    return [*given, *(["--strict"] if strict else []), *(["--json"] if as_json else [])]


def _check(ds_config: str | None, nproc: int | None, strict: bool, as_json: bool) -> _Result:
    from . import output
    from .all_checks import check_alone, check_together, exit_code, job_of_environment
    from .verdicts import Runner

    job, runner = job_of_environment(ds_config, nproc), Runner()
    together = job.has_other_ranks
    with _stdout_kept_free():
        findings, group = (
            check_together(job, runner) if together else (check_alone(job, runner), None)
        )
    code = exit_code(findings, strict=strict)
    connection_failed = any(each.check == "connection" for each in findings)
    ranks = f"{job.world_size} ranks, rank 0 on " if together else ""
    # Without a connection, each host prints its own findings.
    if job.rank == 0 or (job.local_rank == 0 and connection_failed):
        title = f"zerowatch check: {ranks}{socket.gethostname()}"
        if as_json:
            click.echo(output.as_json(findings, title, code))
        else:
            output.print_findings(findings, title, sys.stdout)
        sys.stdout.flush()
    elif connection_failed:  # torchrun would end the rank that prints, which may not be done yet
        code = 0
    if group is not None:
        with _stdout_kept_free():
            runner.call("connection", _CLOSE_SECONDS, group.close)
    return _Result(code, bool(runner.hung))


@contextmanager
def _stdout_kept_free() -> Iterator[None]:
    """Drop what DeepSpeed logs to stdout, and send what C code such as NCCL prints to stderr."""
    sys.stdout.flush()
    _flush_stdout_of_c()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        _flush_stdout_of_c()
        os.dup2(own, 1)
        os.close(own)


def _flush_stdout_of_c() -> None:
    """Write what C code has printed: unless stdout is a terminal, libc keeps it in a buffer."""
    libc = ctypes.CDLL(None)
    # fflush(NULL) would wait for a file that the thread of a check is reading.
    libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))


def _exit(result: _Result, exit_file: str | None) -> NoReturn:
    """End this process. Under our own launcher the exit code goes to a file.

    torchrun prints a long report on a rank that does not exit with 0.
    """
    code = result.code
    if exit_file is not None:
        Path(exit_file, os.environ["LOCAL_RANK"]).write_text(str(code))
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    if result.has_hung:  # at its exit Python would wait for the thread
        os._exit(code)
    sys.exit(code)


def _launch(nproc: int, nnodes: int, endpoint: str | None, options: list[str]) -> int:
    """Run the check on ranks of this host, and return the exit code."""
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from ...devices.cpu import usable_cores
    from ..run_command import refuse_namesake

    refuse_namesake("check")
    if nnodes > 1 and endpoint is None:
        raise CommandLineError(
            f"check: --nnodes {nnodes} needs --rdzv-endpoint, an address of the first host and a "
            "free port, such as host0:29400"
        )
    if nnodes > 1:
        try:
            parse_rendezvous_endpoint(endpoint, default_port=29400)
        except ValueError as error:
            raise CommandLineError(f"check: --rdzv-endpoint: {error}") from error
    meeting = ["--standalone"] if nnodes == 1 else [f"--rdzv-endpoint={endpoint}"]
    if nnodes > 1:
        meeting += ["--rdzv-backend=c10d", "--rdzv-id=zerowatch-check"]
        meeting += [f"--rdzv-conf=join_timeout={_JOIN_SECONDS}"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(usable_cores()) // nproc)))
    with tempfile.TemporaryDirectory(prefix="zerowatch-check-") as folder:
        command = [f"--nproc-per-node={nproc}", f"--nnodes={nnodes}", *meeting]
        command += ["-m", "zerowatch.runtime.cli.check", f"--exit-file={folder}", *options]
        try:
            torchrun.main(command)
        except ChildFailedError as error:
            status = error.get_first_failure()[1].exitcode
            sys.stderr.write(
                f"zerowatch: check: a rank ended with status {status} before it was done\n"
            )
            return 1
        except (RendezvousError, DistError) as error:
            if nnodes == 1:
                raise
            sys.stderr.write(
                f"zerowatch: check: the hosts do not meet at {endpoint} (--rdzv-endpoint): "
                f"{_reason(error, nnodes)}. Run the same command on each of the {nnodes} hosts, "
                "with an address of the first host and a port that is free there\n"
            )
            return 1
        except SignalException as error:
            return 128 + error.sigval
        codes = [int(file.read_text()) for file in Path(folder).iterdir()]
    return max(codes, default=1)


def _reason(error: Exception, nnodes: int) -> str:
    """Return why the hosts do not meet, for torch's rendezvous often the text of the cause."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {nnodes} hosts have come within {_JOIN_SECONDS} s"
    return str(error.__cause__ or error).rstrip(".") or type(error).__name__
