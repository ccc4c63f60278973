"""What `zerowatch report` and `zerowatch compare` share: options, the file, and --fail-on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ...errors import CommandLineError

if TYPE_CHECKING:
    from ..reports.fail_on import Condition

EXIT_CODE_OF_ERROR = 2
EXIT_CODE_OF_CONDITION = 3
STANDARD_OUTPUT = Path("-")
C = TypeVar("C", bound=Callable[..., Any])

markdown_option = click.option("--markdown", is_flag=True, help="Print Markdown.")
json_option = click.option("--json", is_flag=True, help="Print JSON.")
figures_option = click.option(
    "--figures", "lists_figures", is_flag=True, help="List the figures for --fail-on."
)


def output_option(default: str) -> Callable[[C], C]:
    """Return the option --output, given the file to which HTML is written by default."""
    return click.option(
        "--output",
        "-o",
        type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
        help=f"File to write; - prints.  [default: {default} for HTML]",
    )


def fail_on_option(example: str) -> Callable[[C], C]:
    """Return the option --fail-on, given a condition to show."""
    return click.option(
        "--fail-on",
        "conditions",
        multiple=True,
        metavar="CONDITION",
        help=f"Exit with code 3 if a figure meets the condition, such as '{example}'. May be given "
        "several times.",
    )


def chosen_form(forms: Mapping[str, bool], default: str) -> Any:
    """Return the name of the form whose option was given.

    Args:
        forms: Whether the option of each form was given.
        default: The form without an option.

    Raises:
        click.UsageError: Several options were given.
    """
    given = [name for name, is_given in forms.items() if is_given]
    if len(given) > 1:
        options = " and ".join(f"--{name}" for name in given)
        raise click.UsageError(
            f"{options} cannot be used together: one call makes one form.",
            click.get_current_context(),
        )
    return given[0] if given else default


def print_figures(figures: Mapping[str, str]) -> None:
    """Print the name and the meaning of each figure."""
    width = max(map(len, figures))
    click.echo("\n".join(f"{name:{width}}  {text}" for name, text in figures.items()))


def write_output(output: Path, text: str, *, is_given: bool, mode: int = 0o644) -> None:
    """Write a file.

    Args:
        output: The file.
        text: Its content.
        is_given: Whether the user has given the file. Then links are followed, and a device or a
            FIFO is written to; else they are replaced, as another user may have created them.
        mode: The permissions of the file.

    Raises:
        CommandLineError: It cannot be written.
    """
    from ...metrics.atomic_file import atomic_write

    try:
        if is_given and output.exists() and not output.is_file():
            output.write_text(text, encoding="utf-8", errors="surrogateescape")
        else:
            path = Path(os.path.realpath(output)) if is_given else output
            atomic_write(path, text, mode=mode)
    except OSError as error:
        raise CommandLineError(
            f"cannot write {output}: {error.strerror}; give another file by --output"
        ) from None


def check_conditions(conditions: Sequence[Condition], figures: Mapping[str, float | None]) -> int:
    """Print each condition that holds, with the value of its figure. Return the exit code.

    A condition whose figure is not known is printed too, and hides none that holds.
    """
    exit_code = 0
    for condition in conditions:
        try:
            is_held = condition.holds(figures)
        except CommandLineError as error:
            click.echo(f"zerowatch: {error}", err=True)
            exit_code = exit_code or EXIT_CODE_OF_ERROR
            continue
        if is_held:
            click.echo(f"zerowatch: {condition}: it is {figures[condition.figure]:.4g}", err=True)
            exit_code = EXIT_CODE_OF_CONDITION
    return exit_code
