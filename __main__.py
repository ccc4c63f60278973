"""Entry points: the program `zerowatch`, and `python -m zerowatch`, which runs a script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from .errors import CommandLineError, ZerowatchError

# Options that the deepspeed launcher and torch.distributed.launch put after a module's name.
_LAUNCHER_RANK_OPTIONS = ("--local_rank=", "--local-rank=")
# What click 8.2 and later raise for a group without a command; click 8.1 prints the help itself.
_NoArguments: type[click.UsageError] | tuple[()] = getattr(
    click.exceptions, "NoArgsIsHelpError", ()
)
# Modules that commands need and an environment may lack, and the package that brings each.
_NEEDED = {"torch": "torch", "deepspeed": "deepspeed", "hjson": "deepspeed"}
# The module of each command; it is imported when the command is used or listed.
_MODULES = {
    "run": ".runtime.cli.main",
    "demo": ".runtime.cli.main",
    "estimate": ".runtime.cli.estimate.command",
    "check": ".runtime.cli.check.command",
    "report": ".runtime.cli.report_command",
    "compare": ".runtime.cli.compare_command",
    "top": ".runtime.cli.top_command",
    "stack": ".dashboards.cli",
    "targets": ".dashboards.cli",
    "dashboards": ".dashboards.cli",
    "export": ".dashboards.cli",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _MODULES.get(cmd_name)
        command = module and getattr(import_module(module, __package__), cmd_name)
        return command if isinstance(command, click.Command) else None


_HELP = """Monitoring, out-of-memory recovery and tuning for DeepSpeed training.

With a launcher other than torchrun (deepspeed, mpirun, srun, ...), have it start one of these on
each rank:

\b
    python -m zerowatch SCRIPT [ARGS]...
    python -m zerowatch -m PACKAGE.MODULE [ARGS]...

This form runs the script in the same process, with monitoring enabled. It takes a script or `-m`;
the commands below belong to the program `zerowatch`.
"""


@click.group(cls=_LazyGroup, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zerowatch", prog_name="zerowatch")
def commands() -> None:
    """Define the group of all commands, which does nothing by itself."""


def main() -> None:
    """Run the command line; a usage error prints one line and exits with code 2."""
    try:
        code = commands(prog_name="zerowatch", standalone_mode=False)
    except _NoArguments as error:
        error.show()
        sys.exit(2)
    except (ZerowatchError, click.UsageError) as error:
        _exit_with(error)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        advice = f"pip install {_NEEDED[error.name]}"
        _exit_with(CommandLineError(f"{error.name} is missing, which this command needs; {advice}"))
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _names_script(arguments: Sequence[str]) -> bool:
    """Whether the arguments begin with a script or `-m`, not with an option such as --help."""
    first = arguments[0] if arguments else "--help"
    return first == "-m" or first.startswith(_LAUNCHER_RANK_OPTIONS) or not first.startswith("-")


def _attach(arguments: Sequence[str]) -> None:
    from .runtime.cli.attach import prepare

    rank = arguments[:1] if arguments[0].startswith(_LAUNCHER_RANK_OPTIONS) else []
    try:
        script = prepare(arguments[len(rank) :], launcher_arguments=rank)
    except ZerowatchError as error:
        is_command = arguments[0] in _MODULES
        _exit_with(error, f"; the command is `zerowatch {arguments[0]}`" if is_command else "")
    # Outside of the `try`: exceptions of the script belong to the script.
    script.run()


def _exit_with(error: ZerowatchError | click.UsageError, advice: str = "") -> NoReturn:
    message = str(error)
    if isinstance(error, click.UsageError):
        message = error.format_message().rstrip(".")
        if message.startswith("No such command") and message.endswith(".py'"):
            message += "; to train a script, write `zerowatch run` before it"
        advice = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    click.echo(f"zerowatch: {message}{advice}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    if _names_script(sys.argv[1:]):
        _attach(sys.argv[1:])
    else:
        main()
