"""The command `estimate`: what a DeepSpeed configuration will cost, before it runs."""

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
    from ...estimator.plan import Plan
    from ...estimator.shapes import ModelShape, Topology
    from .micro_batch import BatchPlan

_ALL = "all"


@click.command(short_help="What a configuration will send and hold, per ZeRO stage.")
@click.argument("config_file", metavar="DS_JSON")
@click.option("--world", type=int, required=True, help="Ranks of the job.")
@click.option("--params", "size", help="Parameters of the model, as 125M, 7B, 1e9 or 350000.")
@click.option(
    "--model", "model_name", metavar="MODULE:CALLABLE", help="A callable that returns the model."
)
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), default="nccl", show_default=True)
@click.option("--tp", type=int, help="Ranks of tensor parallelism.  [default: the configuration's]")
@click.option("--pp", type=int, default=1, show_default=True, help="Ranks of pipeline parallelism.")
@click.option(
    "--stage",
    type=click.Choice([_ALL, "0", "1", "2", "3"]),
    default=_ALL,
    show_default=True,
    help="ZeRO stage to plan for.",
)
@click.option("--sequence", type=int, help="Tokens of a sample; adds what activations take.")
@click.option(
    "--micro-batch", type=int, help="Samples of a micro-batch.  [default: the configuration's]"
)
@click.option("--memory", metavar="SIZE", help="Memory of the device, as 80GiB: what fits in it?")
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
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
    memory: str | None,
    as_json: bool,
) -> None:
    """Say what the configuration DS_JSON will put on the wire and hold in memory.

    Nothing is trained and no GPU is needed: collectives, bytes and the memory of one rank are
    worked out from the configuration and the model's shapes, for each ZeRO stage.

    Example: zerowatch estimate ds.json --world 8 --model my_project.model:build
    """
    from ...estimator.options import stage_of
    from .micro_batch import BatchOptions, batch_plan
    from .model import model_of

    config = _read_config(config_file)
    _warn_of_misspelt_keys(config, config_file)
    own_stage = stage_of(config, config_file)
    model = model_of(size, model_name)
    topology = _topology(config, world, tp, pp, backend)
    plans = _plans(config, model[0], topology, stage, config_file)
    asked = BatchOptions(sequence=sequence, micro_batch=micro_batch, memory=memory)
    batch = batch_plan(asked, config, model, topology, config_file)
    if as_json:
        click.echo(json.dumps(_as_json(plans, model[0], topology, batch), indent=2))
        return
    from .tables import Heading, print_plans

    heading = Heading(config_file, model[0], topology, own_stage, batch)
    print_plans(plans, heading, sys.stdout)


def _read_config(config_file: str) -> Mapping[str, Any]:
    try:
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(
            f"{config_file} cannot be read: {error.strerror}; give a JSON file"
        ) from error
    except ValueError as error:
        raise DsConfigError(f"{config_file} is no JSON: {error}; correct it there") from error
    if not isinstance(config, dict):
        raise DsConfigError(f"{config_file} holds no JSON object; give a DeepSpeed configuration")
    return config


def _warn_of_misspelt_keys(config: Mapping[str, Any], config_file: str) -> None:
    from ...common.ds_config_keys import misspelt_keys

    found = [f"{key!r} (did you mean {meant!r}?)" for key, meant in misspelt_keys(config)]
    if found:
        ignored = ", ".join(found)
        click.echo(
            f"zerowatch: {config_file}: DeepSpeed does not know and ignores {ignored}", err=True
        )


def _topology(
    config: Mapping[str, Any], world: int, tp: int | None, pp: int, backend: str
) -> Topology:
    from ...estimator.shapes import Topology

    if tp is None:
        block = config.get("tensor_parallel")
        tp = block.get("autotp_size", 1) if isinstance(block, dict) else 1
        tp = tp if isinstance(tp, int) and tp > 0 else 1
    for option, ranks in (("--world", world), ("--tp", tp), ("--pp", pp)):
        if ranks < 1:
            raise CommandLineError(f"{option} is {ranks}; give 1 or more")
    if world % (tp * pp):
        raise CommandLineError(
            f"--world {world} does not divide into --tp {tp} x --pp {pp} ranks; change one of them"
        )
    return Topology(world_size=world, tensor_parallel=tp, pipeline_parallel=pp, backend=backend)


def _plans(
    config: Mapping[str, Any], model: ModelShape, topology: Topology, stage: str, origin: str
) -> list[Plan]:
    from ...estimator.step import plan_step, refuse_auto, stages_for

    stages = stages_for(topology) if stage == _ALL else (int(stage),)
    refuse_auto(config, stages, origin)
    return [plan_step(model, config, topology, stage=one, origin=origin) for one in stages]


def _as_json(
    plans: list[Plan], model: ModelShape, topology: Topology, batch: BatchPlan
) -> dict[str, Any]:
    return {
        "topology": asdict(topology),
        "parameters": model.num_parameters,
        "trained_parameters": model.num_trained,
        "batch": {**asdict(batch), "activation_bytes": _known_activation_bytes(batch)},
        "plans": [
            {
                **asdict(plan),
                "wire_bytes": plan.wire_bytes,
                "volume_ratio": plan.volume_ratio,
                "peak": asdict(batch.peak(plan)),
                "largest_micro_batch": batch.largest(plan),
            }
            for plan in plans
        ],
    }


def _known_activation_bytes(batch: BatchPlan) -> int | None:
    return batch.activation_bytes if batch.activations else None
