"""Runs `zerowatch run`: torchrun that starts each rank's script by `python -m zerowatch`."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import CommandLineError
from ...metrics.settings import LAUNCHED_RUN_ID, ConsoleMode, load_settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..common.launcher_link import RunFolderReceiver


def launch(arguments: Sequence[str]) -> int:
    """Run a script with monitoring on the ranks of this node, and wait for them.

    torchrun's agent runs in this process: a separate `torchrun` would turn every exit code of the
    script into 1.

    Args:
        arguments: torchrun's command line: its options, the script, the script's arguments.

    Returns:
        The exit code of the first rank that failed (128 + n if signal n ended it), or 0.

    Raises:
        CommandLineError: The script does not exist, an option prevents monitoring, or the ranks
            would import another zerowatch.
        SettingsError: A setting is invalid.
    """
    from ..common.launcher_link import receive_run_folder

    options = _parse(arguments)
    _check(options)
    refuse_namesake("run")
    _set_run_id(options)
    _prepare_restarts(options)
    settings = load_settings()
    with receive_run_folder(settings.run_log.folder) as receiver:
        code, error = _run_ranks(
            _monitored_command(arguments, options),
            receiver,
            options.rdzv_endpoint,
            options.rdzv_id,
        )
        code = _print_ends(receiver.folders(), code, settings.console)
    if error is not None:
        error.name = options.training_script  # otherwise torchrun's summary names zerowatch
        sys.stderr.write(f"{error.format_msg()}\n")
    return code


def _run_ranks(
    command: list[str], receiver: RunFolderReceiver, endpoint: str, job_id: str
) -> tuple[int, ChildFailedError | None]:
    """Run torchrun with a command line; return the exit code, and the error of a rank that failed.

    Args:
        command: The command line.
        receiver: Receives the run folders.
        endpoint: Address of the rendezvous store.
        job_id: torchrun's `--rdzv-id`.

    Raises:
        CommandLineError: An option is invalid, or the rendezvous store or another node is lost.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from .launcher_notes import record_worker_exits, recover_steps
    from .node_watch import rendezvous_failure, watch_nodes

    try:
        with (
            record_worker_exits(receiver),
            watch_nodes(endpoint, receiver),
            _errors_of_options(),
        ):
            try:
                torchrun.main(command)
            finally:  # the rings of this node's ranks are on this node
                recover_steps(receiver.runs())
    except RendezvousError as error:
        raise CommandLineError(rendezvous_failure(error, endpoint, job_id)) from error
    except ChildFailedError as error:
        return _exit_code(error.get_first_failure()[1].exitcode), error
    except SignalException as error:
        return 128 + error.sigval, None
    return 0, None


@contextmanager
def _errors_of_options() -> Iterator[None]:
    """Make errors that torchrun raises before its agent runs errors of the command line.

    Raises:
        CommandLineError: An option is invalid.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    run, has_begun = LocalElasticAgent.run, False

    def begun(agent: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal has_begun
        has_begun = True
        return run(agent, *arguments, **options)

    LocalElasticAgent.run = begun  # type: ignore[method-assign]
    try:
        yield
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        if has_begun:
            raise
        # Two of torch's assertions have no message.
        unnamed = "--nproc-per-node and --monitor-interval must be greater than 0"
        reason = str(error).rstrip(".") or unnamed
        raise CommandLineError(
            f"run: an option of torchrun is invalid: {reason}; see `torchrun --help`"
        ) from error
    finally:
        LocalElasticAgent.run = run  # type: ignore[method-assign]


def _print_ends(folders: Sequence[Path], code: int, console: ConsoleMode) -> int:
    """Print the end of each run of the script, and return the exit code.

    torch's handlers of signals stay installed after the ranks have ended. A signal ends the tables.

    Args:
        folders: The run folders.
        code: The exit code of the ranks.
        console: What is printed of a run whose settings cannot be read.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from .launcher_notes import is_answering
    from .run_end import console_of, print_run_end

    is_in_order, is_stopped = code in (0, 128 + signal.SIGINT), False
    for folder in folders:
        try:
            if is_answering(folder):
                shown = "off" if is_stopped else console_of(folder, console)
                print_run_end(folder, is_in_order=is_in_order, console=shown)
        except SignalException as error:
            code, is_stopped = code or 128 + error.sigval, True
    return code


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parse the command line with torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "zerowatch run"
    parser.error = _fail  # type: ignore[method-assign]  # one line, without torchrun's usage
    return parser.parse_args(arguments)


def _fail(message: str) -> NoReturn:
    raise CommandLineError(f"run: {message}")


def _check(options: Namespace) -> None:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        parse_min_max_nnodes(options.nnodes)
    except (RuntimeError, ValueError):
        raise CommandLineError(
            f"run: --nnodes {options.nnodes!r} is no number of nodes; give one such as 2, or "
            "LEAST:MOST such as 1:4"
        ) from None
    if options.no_python or options.run_path:
        option = "--no-python" if options.no_python else "--run-path"
        raise CommandLineError(
            f"run: {option} cannot be monitored, because monitoring needs one Python process per "
            "rank; remove the option, or use torchrun"
        )
    script = options.training_script
    if options.module:
        package = script.partition(".")[0]
        # The second finds packages that are installed in editable form, by a finder of their own.
        here = PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        if here is None and importlib.util.find_spec(package) is None:
            raise CommandLineError(f"run: no module named {package!r}, here or installed")
    elif not os.path.isfile(script):
        raise CommandLineError(f"run: no script {script!r} in {os.getcwd()}")


def refuse_namesake(command: str) -> None:
    """Refuse another zerowatch in the working directory, where the ranks search first.

    Such as a checkout below the working directory, from which the installed package was built.

    Args:
        command: The name of the command, for the message.

    Raises:
        CommandLineError: The ranks would import another package than this process has imported.
    """
    if os.environ.get("PYTHONSAFEPATH"):
        return
    found = PathFinder.find_spec("zerowatch", [os.getcwd(), *sys.path])
    own = Path(__file__).parents[2]
    if found is None or (found.origin and os.path.samefile(found.origin, own / "__init__.py")):
        return
    place = found.origin or next(iter(found.submodule_search_locations or ()), os.getcwd())
    raise CommandLineError(
        f"{command}: the ranks would import zerowatch from {place}, because they search the "
        f"working directory first, and not from {own}; start in another directory, or rename the "
        "one in this"
    )


def _set_run_id(options: Namespace) -> None:
    """Set the same run id for all ranks; on several nodes rank 0 shares one instead."""
    from torch.distributed.run import parse_min_max_nnodes

    from ..common.process_info import new_run_id

    if load_settings().run_id is None and parse_min_max_nnodes(options.nnodes)[1] == 1:
        os.environ[LAUNCHED_RUN_ID] = new_run_id()


def _prepare_restarts(options: Namespace) -> None:
    """Use a new store for each restart, if `--max-restarts` allows any.

    torch 2.5 and later keep one store in the agent for all restarts. Restarted ranks then read the
    addresses of their predecessors and cannot connect (pytorch issue 135712).

    Raises:
        CommandLineError: The rendezvous is static, which has a single store.
    """
    from torch.distributed.run import parse_min_max_nnodes

    if options.max_restarts < 1:
        return
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    is_static = options.rdzv_backend == "static" and not options.standalone
    has_port = options.master_port is not None or options.rdzv_endpoint
    if is_static and (has_port or parse_min_max_nnodes(options.nnodes)[1] > 1):
        raise CommandLineError(
            "run: --max-restarts is not possible with a fixed --master-port or a static "
            "rendezvous: restarted ranks would read the addresses of their predecessors in its "
            "store, and could not connect. On one node, use --standalone, which finds a free port, "
            "in place of --master-port. On several nodes, use --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT --rdzv-id JOB"
        )


def _monitored_command(arguments: Sequence[str], options: Namespace) -> list[str]:
    """Insert `-m zerowatch` before the script, or before the `-m` of the user's module."""
    script = [options.training_script, *options.training_script_args]
    end_of_options = len(arguments) - len(script)
    if arguments[end_of_options] != options.training_script:
        end_of_options -= 1  # argparse drops a "--" after the script
    own = list(arguments[:end_of_options])
    if options.module:
        return [*own, "zerowatch", "-m", *script]
    return ["-m", *own, "zerowatch", *script]


def _exit_code(status: int) -> int:
    """Return the exit code that a shell shows for a child's status."""
    return 128 - status if status < 0 else status
