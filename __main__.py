"""The command line: its group of commands, and what `python -m zerowatch` runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from .errors import ZerowatchError

# What the deepspeed launcher puts behind a module's name, and torch.distributed.launch likewise.
_LAUNCHERS_RANK = ("--local_rank=", "--local-rank=")
# Where each command lives. A room is imported when its command is used or listed, never before.
_ROOMS = {
    "run": ".runtime.cli.main",
    "demo": ".runtime.cli.main",
    "estimate": ".runtime.cli.estimate.command",
    "stack": ".dashboards.cli",
    "dashboards": ".dashboards.cli",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_ROOMS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        room = _ROOMS.get(cmd_name)
        command = room and getattr(import_module(room, __package__), cmd_name)
        return command if isinstance(command, click.Command) else None


_HELP = """Watch a DeepSpeed training run from the inside.

Under a launcher other than torchrun (deepspeed, mpirun, srun, ...), one process per rank, start
the script by module instead of by command:

\b
    python -m zerowatch SCRIPT [ARGS]...
    python -m zerowatch -m PACKAGE.MODULE [ARGS]...

This form runs the script in that very process, watched. Its first argument is always a script or
`-m`, never a command; commands belong to the program `zerowatch`.
"""


@click.group(cls=_LazyGroup, help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zerowatch", prog_name="zerowatch")
def commands() -> None:
    """Hold the commands; each does its own work."""


def main() -> None:
    """Run the command line; a mistake of the caller is one line and exit code 2."""
    try:
        code = commands(prog_name="zerowatch", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except (ZerowatchError, click.UsageError) as error:
        _refuse(error)
    except click.Abort:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _names_script(arguments: Sequence[str]) -> bool:
    """Tell a script or `-m` from an option of ours, such as --help."""
    first = arguments[0] if arguments else "--help"
    return first == "-m" or first.startswith(_LAUNCHERS_RANK) or not first.startswith("-")


def _attach(arguments: Sequence[str]) -> None:
    from .runtime.cli.attach import prepare

    rank = arguments[:1] if arguments[0].startswith(_LAUNCHERS_RANK) else []
    try:
        script = prepare(arguments[len(rank) :], launchers_arguments=rank)
    except ZerowatchError as error:
        mistaken = arguments[0] in _ROOMS  # a command, where only a script can stand
        _refuse(error, f"; the command is `zerowatch {arguments[0]}`" if mistaken else "")
    # Outside of the `try`: what the script itself raises is the script's own affair.
    script.run()


def _refuse(error: ZerowatchError | click.UsageError, hint: str = "") -> NoReturn:
    said = str(error)
    if isinstance(error, click.UsageError):
        said = error.format_message().rstrip(".")
        if said.startswith("No such command") and said.endswith(".py'"):
            said += "; to train a script, write `zerowatch run` before it"
        hint = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    click.echo(f"zerowatch: {said}{hint}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    if _names_script(sys.argv[1:]):
        _attach(sys.argv[1:])
    else:
        main()
