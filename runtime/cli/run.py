"""`zerowatch run`: torchrun, with every rank's script started by `python -m zerowatch`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import NoReturn

from ...errors import CommandLineError
from ...metrics.settings import ENVIRONMENT_PREFIX, load_settings


def launch(arguments: Sequence[str]) -> int:
    """Run a script on the ranks of this node, watched, and wait for them.

    torchrun's agent runs in this very process, because a `torchrun` of its own would turn every
    exit code of the script into 1.

    Args:
        arguments: The command line of torchrun: its options, the script, the script's arguments.

    Returns:
        The exit code of the first rank that failed (128 + n if signal n ended it), or 0.

    Raises:
        CommandLineError: There is no such script, or it cannot be watched.
        SettingsError: A setting is wrong.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = _parse(arguments)
    _check(options)
    _name_run(options)
    _prepare_restarts(options)
    try:
        torchrun.main(_watched(arguments, options))
    except ChildFailedError as error:
        error.name = options.training_script  # torchrun's summary would say that we failed
        sys.stderr.write(f"{error.format_msg()}\n")
        return _exit_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _parse(arguments: Sequence[str]) -> Namespace:
    """Read the command line by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "zerowatch run"
    parser.error = _refuse  # type: ignore[method-assign]  # one line, without torchrun's usage
    return parser.parse_args(arguments)


def _refuse(message: str) -> NoReturn:
    raise CommandLineError(f"run: {message}")


def _check(options: Namespace) -> None:
    if options.no_python or options.run_path:
        option = "--no-python" if options.no_python else "--run-path"
        raise CommandLineError(
            f"run: {option} cannot be watched, as the watch needs a Python process of its own "
            "per rank; leave the option out, or use torchrun"
        )
    script = options.training_script
    if options.module:
        package = script.partition(".")[0]
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise CommandLineError(f"run: no module named {package!r}, here or installed")
    elif not os.path.isfile(script):
        raise CommandLineError(f"run: no script {script!r} in {os.getcwd()}")


def _name_run(options: Namespace) -> None:
    """Give all ranks the same run id; with more nodes than this one, rank 0 shares it instead."""
    from torch.distributed.run import parse_min_max_nnodes

    from ..common.process_info import new_run_id

    if load_settings().run_id is None and parse_min_max_nnodes(options.nnodes)[1] == 1:
        os.environ[f"{ENVIRONMENT_PREFIX}RUN_ID"] = new_run_id()


def _prepare_restarts(options: Namespace) -> None:
    """Give each attempt a store of its own, where `--max-restarts` allows more than one.

    torch 2.5 and later keep one for all of them, in the agent. Ranks that start anew then find
    where those before them listened, and cannot connect (pytorch issue 135712).
    """
    if not options.max_restarts:
        return
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    is_static = options.rdzv_backend == "static" and not options.standalone
    if is_static and (options.master_port is not None or options.rdzv_endpoint):
        sys.stderr.write(
            "zerowatch: with --master-port, restarted ranks share a store with those before them, "
            "and may fail to connect; for restarts leave it out on one node, and take "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT on several\n"
        )


def _watched(arguments: Sequence[str], options: Namespace) -> list[str]:
    """Put `-m zerowatch` before the script, or before the `-m` of the user's module."""
    end_of_options = len(arguments) - len(options.training_script_args) - 1
    own, script = list(arguments[:end_of_options]), list(arguments[end_of_options:])
    if options.module:
        return [*own, "zerowatch", "-m", *script]
    return ["-m", *own, "zerowatch", *script]


def _exit_code(status: int) -> int:
    """Turn a child's status into the exit code that a shell would show."""
    return 128 - status if status < 0 else status
