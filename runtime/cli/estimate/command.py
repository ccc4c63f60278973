"""Runs the command `estimate`: communication and memory of a ds config before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....errors import CommandLineError, DsConfigError

if TYPE_CHECKING:
    from ...estimator.model_shape import ModelShape, Topology
    from ...estimator.step_estimate import StepEstimate
    from .inputs import RankBatch

_ALL = "all"
_MAX_RANKS = 1_000_000  # ten times the largest cluster; the time of a plan grows with the ranks


@click.command(short_help="Estimate communication and memory of a ds config.")
@click.argument("config_file", metavar="DS_JSON")
@click.option("--world", type=int, required=True, help="Number of ranks.")
@click.option(
    "--params", "size", metavar="SIZE", help="Number of parameters: 125M, 7B, 1e9 or 350000."
)
@click.option(
    "--model",
    "model_name",
    metavar="MODULE:CALLABLE",
    help="A callable without arguments that returns the model.",
)
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    show_default=True,
    help="Communication backend.",
)
@click.option("--tp", type=int, help="Tensor-parallel ranks.  [default: from DS_JSON]")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline-parallel ranks.")
@click.option(
    "--stage",
    type=click.Choice([_ALL, "0", "1", "2", "3"]),
    default=_ALL,
    show_default=True,
    help="ZeRO stage to estimate.",
)
@click.option("--sequence", type=int, help="Tokens per sample; includes activations.")
@click.option(
    "--micro-batch",
    type=int,
    help="Samples per micro-batch; needs --sequence.  [default: from DS_JSON]",
)
@click.option(
    "--grad-accum",
    "accumulation",
    type=click.IntRange(min=1),
    help='Value of gradient_accumulation_steps where DS_JSON has "auto".',
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help='Precision of training where DS_JSON has "auto" at bf16.enabled or fp16.enabled.',
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Device memory, such as 80GiB: shows the largest micro-batch that fits; needs --sequence.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    config_file: str,
    world: int,
    size: str | None,
    model_name: str | None,
    backend: str,
    tp: int | None,
    pp: int,
    stage: str,
    sequence: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    dtype: str | None,
    memory: str | None,
    as_json: bool,
) -> None:
    """Estimate communication and memory of the DeepSpeed configuration DS_JSON.

    For each ZeRO stage, prints the collectives and bytes that one rank sends per optimizer step,
    and the memory that it needs. The model is either a typical transformer (--params) or your own
    (--model). Nothing is trained and no GPU is needed.

    Example: zerowatch estimate ds.json --world 8 --params 7B --sequence 4096 --memory 80GiB

    Where DS_JSON has Hugging Face's "auto", sizes of buckets follow from the model as in Hugging
    Face; give the others with --grad-accum, --dtype and, with --sequence, --micro-batch.
    """
    from ...estimator.config_reader import ConfigReader
    from .auto_values import TrainingValues, fill_in
    from .inputs import MemoryOptions, read_batch, read_model

    config = _read_config(config_file)
    _warn_of_misspelled_keys(config, config_file)
    configured_stage = ConfigReader(config, config_file).stage()
    model = read_model(size, model_name)
    training = TrainingValues(accumulation=accumulation, micro_batch=micro_batch, dtype=dtype)
    config, filled = fill_in(config, training, model)
    topology = _topology(config, world, tp, pp, backend)
    estimates = _estimates(config, model.shape, topology, stage, config_file)
    given = MemoryOptions(sequence=sequence, micro_batch=micro_batch, memory=memory)
    batch = read_batch(given, config, model, topology, config_file)
    if filled:
        values = ", ".join(f"{key} = {value}" for key, value in filled.items())
        click.echo(f'zerowatch: {config_file}: "auto" filled in: {values}', err=True)
    if as_json:
        click.echo(json.dumps(_as_json(estimates, model.shape, topology, batch), indent=2))
        return
    from .result_tables import Heading, print_estimates

    heading = Heading(config_file, model.shape, topology, configured_stage, batch)
    print_estimates(estimates, heading, sys.stdout)


def _read_config(config_file: str) -> Mapping[str, Any]:
    from ....metrics.settings import load_settings
    from ...common.ds_config import parse_text, read_zerowatch_block

    try:
        config = parse_text(Path(config_file).read_text(encoding="utf-8"), unique_keys=True)
    except OSError as error:
        raise CommandLineError(
            f"{config_file} cannot be read: {error.strerror}; give a JSON file"
        ) from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise DsConfigError(f"{config_file} is not valid JSON: {reason}; fix it") from error
    if not isinstance(config, dict):
        raise DsConfigError(f"{config_file} has no JSON object; give a DeepSpeed configuration")
    load_settings(ds_block=read_zerowatch_block(config))  # a mistake is an error here, as in a run
    return config


def _warn_of_misspelled_keys(config: Mapping[str, Any], config_file: str) -> None:
    from ...common.ds_config_errors import misspelled_keys

    hints = [f"{key!r} (did you mean {meant!r}?)" for key, meant in misspelled_keys(config)]
    if hints:
        click.echo(
            f"zerowatch: {config_file}: DeepSpeed ignores unknown keys: {', '.join(hints)}",
            err=True,
        )


def _topology(
    config: Mapping[str, Any], world: int, tp: int | None, pp: int, backend: str
) -> Topology:
    from ...estimator.model_shape import Topology

    if tp is None:
        block = config.get("tensor_parallel")
        tp = block.get("autotp_size", 1) if isinstance(block, dict) else 1
        tp = tp if isinstance(tp, int) and tp > 0 else 1
    for option, ranks in (("--world", world), ("--tp", tp), ("--pp", pp)):
        if not 1 <= ranks <= _MAX_RANKS:
            raise CommandLineError(f"{option} is {ranks}; give 1 to {_MAX_RANKS:,}")
    if world % (tp * pp):
        raise CommandLineError(
            f"--world {world} is not divisible by --tp {tp} x --pp {pp} ranks; change one of them"
        )
    return Topology(world_size=world, tensor_parallel=tp, pipeline_parallel=pp, backend=backend)


def _estimates(
    config: Mapping[str, Any], model: ModelShape, topology: Topology, stage: str, origin: str
) -> list[StepEstimate]:
    """Return the estimate of each stage; of all stages, those that DeepSpeed rejects are left out.

    Raises:
        DsConfigError: The configuration is invalid, or DeepSpeed rejects it at its own stage.
    """
    from ...estimator.config_reader import STAGES, ConfigReader
    from ...estimator.estimate_step import (
        UnsupportedStageError,
        estimate_step,
        raise_for_auto,
        stages_for,
    )

    stages = STAGES if stage == _ALL else (int(stage),)
    raise_for_auto(config, (one for one in stages if one in stages_for(topology)), origin)
    required = ConfigReader(config, origin).stage() if stage == _ALL else int(stage)
    estimates, left_out = [], []
    for one in stages:
        try:
            estimates.append(estimate_step(model, config, topology, stage=one, origin=origin))
        except UnsupportedStageError as error:
            if one == required:
                raise
            left_out.append(f"zerowatch: stage {one} is left out: {error}")
    for line in left_out:
        click.echo(line, err=True)
    return estimates


def _as_json(
    estimates: list[StepEstimate], model: ModelShape, topology: Topology, batch: RankBatch
) -> dict[str, Any]:
    activation_bytes = batch.activation_bytes if batch.activations else None
    return {
        "topology": asdict(topology),
        "parameters": model.num_parameters,
        "trained_parameters": model.num_trained,
        "batch": {**asdict(batch), "activation_bytes": activation_bytes},
        "estimates": [
            {
                **asdict(estimate),
                "wire_bytes": estimate.wire_bytes,
                "volume_ratio": estimate.volume_ratio,
                "peak": asdict(batch.peak(estimate)),
                "largest_micro_batch": batch.largest(estimate),
            }
            for estimate in estimates
        ],
    }
