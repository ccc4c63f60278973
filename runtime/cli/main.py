"""Defines the command lines of `run` and `demo`; their implementations are imported on use."""

from __future__ import annotations

import sys

import click

# Options before the script belong to torchrun, arguments after it to the script; click parses none.
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(
    context_settings=_PASS_THROUGH,
    options_metavar="[TORCHRUN OPTIONS]",
    short_help="Run a script under torchrun with monitoring enabled.",
)
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."
)
def run(arguments: tuple[str, ...]) -> None:
    """Run SCRIPT under torchrun with monitoring enabled; the script needs no change.

    All options of torchrun are accepted, except --no-python and --run-path; see `torchrun --help`.
    To run a module, give `-m PACKAGE.MODULE` instead of SCRIPT.

    With --max-restarts N, all ranks restart after a failure, and a TrainingRun resumes from its
    last checkpoint. This is not possible with a fixed --master-port.

    Example: zerowatch run --nproc-per-node 8 train.py --deepspeed ds.json

    The exit code is that of the first rank that failed, or 128 + n if signal n ended it.
    """
    from .run_command import launch

    sys.exit(launch(arguments))


@click.command(short_help="Train a small built-in model with monitoring and tuning.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps."
)
@click.option(
    "--nproc",
    "num_processes",
    type=click.IntRange(min=1),
    help="Processes on this machine.  [default: one per GPU, or 2 without GPUs]",
)
@click.option(
    "--stage", type=click.IntRange(0, 3), default=2, show_default=True, help="ZeRO stage."
)
def demo(steps: int, num_processes: int | None, stage: int) -> None:
    """Train a small byte-level GPT with monitoring and tuning, on Python's standard library."""
    from .demo.launch_ranks import launch_demo

    sys.exit(launch_demo(steps, num_processes, stage))
