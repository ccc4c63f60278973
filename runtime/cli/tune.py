"""The command `tune`: the tuner's decisions of a run, made again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import CommandLineError

if TYPE_CHECKING:
    from ..tuner.policy.recorded import Recorded


@click.command(short_help="Make a run's decisions again, from what was measured.")
@click.option(
    "--replay",
    "run_folder",
    required=True,
    metavar="RUN_DIR",
    type=click.Path(path_type=Path),
    help="Folder of the run, such as runs/night-7.",
)
def tune(run_folder: Path) -> None:
    """Say of each decision of the tuner in a recorded run whether today's code would make it.

    Nothing is trained, and nothing is written. What was seen is diagnosed again, changes are
    proposed again, and the times of each trial are judged again.

    The exit code is 1 if some decision would be another one.

    Example: zerowatch tune --replay runs/night-7
    """
    from ..tuner.policy.journal import DECISIONS_FILE
    from ..tuner.policy.messages import sentence_of
    from ..tuner.policy.replay import replay

    if (run_folder / "settings.json").exists() and not (run_folder / DECISIONS_FILE).exists():
        click.echo(f"{run_folder} has no decisions: its tuner found nothing to change, or was off")
        return
    records = list(_records(run_folder / DECISIONS_FILE))
    num_others = 0
    for record in records:
        differences = replay(record).differences
        num_others += bool(differences)
        click.echo(f"{record.decision.number}. {sentence_of(record.decision)}")
        click.echo(f"   today: {'; '.join(differences) or 'the same'}")
    click.echo(_summary(len(records), num_others))
    sys.exit(1 if num_others else 0)


def _records(path: Path) -> Iterator[Recorded]:
    from ..tuner.policy.recorded import DAMAGES, from_json

    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CommandLineError(
            f"{path} cannot be read: {error.strerror}; give the folder of a run whose tuner "
            "decided something"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            yield from_json(line)
        except DAMAGES as error:
            raise CommandLineError(
                f"line {number} of {path} is damaged or of another version: "
                f"{type(error).__name__}: {error}; take it out to replay the others"
            ) from None


def _summary(num_decisions: int, num_others: int) -> str:
    if not num_others:
        return f"{num_decisions} decisions, all as today's code would make them"
    return f"{num_decisions} decisions, {num_others} of them others today"
