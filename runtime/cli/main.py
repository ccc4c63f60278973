"""The commands that train: run and demo. Their work is imported when they are used."""

from __future__ import annotations

import sys

import click

# All that stands before the script is torchrun's, all behind it the script's: click takes neither.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(
    context_settings=_PASS_THROUGH,
    options_metavar="[TORCHRUN OPTIONS]",
    short_help="Train, watched: torchrun with the watch attached.",
)
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."
)
def run(arguments: tuple[str, ...]) -> None:
    """Run SCRIPT on every rank of this node, watched, without a change to it.

    Takes every option of torchrun, `-m PACKAGE.MODULE` in the place of SCRIPT included; only
    --no-python and --run-path cannot be watched. `torchrun --help` lists the options.

    --max-restarts N starts all ranks again after a failure; a TrainingRun then goes on from its
    last save.

    Example: zerowatch run --nproc-per-node 8 train.py --deepspeed ds.json

    The exit code is that of the rank that failed first, or 128 + n if signal n ended it.
    """
    from .run import launch

    sys.exit(launch(arguments))


@click.command(short_help="Train the built-in model, watched and tuned.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps."
)
@click.option(
    "--nproc",
    "num_processes",
    type=click.IntRange(min=1),
    help="Processes on this machine; by default one per GPU, or 2 without GPUs.",
)
@click.option(
    "--stage", type=click.IntRange(0, 3), default=2, show_default=True, help="ZeRO stage."
)
def demo(steps: int, num_processes: int | None, stage: int) -> None:
    """Train a small byte-level GPT on the standard library's source, watched and tuned."""
    from .demo.launch import launch_demo

    sys.exit(launch_demo(steps, num_processes, stage))
