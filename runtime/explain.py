"""The command `explain`: what a DeepSpeed configuration will cost, before it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import CommandLineError, DsConfigError

if TYPE_CHECKING:
    from .plan.plan import Plan
    from .plan.shapes import ModelShape, Topology

_ALL = "all"
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# What code that builds a model may raise; anything else is worth its traceback.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@click.command(short_help="What a configuration will send and hold, per ZeRO stage.")
@click.argument("config_file", metavar="DS_JSON")
@click.option("--world", type=int, required=True, help="Ranks of the job.")
@click.option("--params", "size", help="Parameters of the model, as 125M, 7B, 1e9 or 350000.")
@click.option("--model", metavar="MODULE:CALLABLE", help="A callable that returns the model.")
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
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def explain(
    config_file: str,
    world: int,
    size: str | None,
    model: str | None,
    backend: str,
    tp: int | None,
    pp: int,
    stage: str,
    as_json: bool,
) -> None:
    """Say what the configuration DS_JSON will put on the wire and hold in memory.

    Nothing is trained and no GPU is needed: the collectives, their bytes and the memory of one rank
    are worked out from the configuration and the model's shapes, for each ZeRO stage, beside the
    least that the stage needs.

    Example: zerowatch explain ds.json --world 8 --model my_project.model:build
    """
    from .plan.options import stage_of

    config = _read_config(config_file)
    own_stage = stage_of(config, config_file)
    shape = _model_shape(size, model)
    topology = _topology(config, world, tp, pp, backend)
    plans = _plans(config, shape, topology, stage, config_file)
    if as_json:
        click.echo(json.dumps(_as_json(plans, shape, topology), indent=2))
        return
    from .explain_table import Heading, print_plans

    print_plans(plans, Heading(config_file, shape, topology, own_stage), sys.stdout)


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


def _model_shape(size: str | None, model: str | None) -> ModelShape:
    if (size is None) == (model is None):
        raise CommandLineError("give either --params, as 7B, or --model, as my_project.model:build")
    if model is not None:
        return _shape_of_model(model)
    from .plan.typical_model import typical_transformer

    return typical_transformer(_num_parameters(size or ""))


def _num_parameters(size: str) -> int:
    unit = size[-1:].upper()
    digits = size[:-1] if unit in _UNITS else size
    try:
        number = round(float(digits) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError) as error:
        raise CommandLineError(f"--params {size} is no size; give it as 125M, 7B or 1e9") from error
    if number < 1000:
        raise CommandLineError(f"--params {size} is no size of a model; give 1000 or more")
    return number


def _shape_of_model(name: str) -> ModelShape:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise CommandLineError(f"--model {name} names no callable; give it as package.module:name")
    sys.path.insert(0, "")  # as `python -m` finds modules
    try:
        build = getattr(import_module(module_name), attribute)
    except _BUILD_ERRORS as error:
        raise _unusable(name, "does not import", error) from error
    return _build(name, build)


def _build(name: str, build: Any) -> ModelShape:
    import torch

    from .plan.read_module import shape_of
    from .plan.run_order import run_order

    try:
        with torch.device("meta"):  # no memory, and no time for random weights
            module = build()
    except _BUILD_ERRORS:
        try:
            module = build()
        except _BUILD_ERRORS as error:
            raise _unusable(name, "fails when it is called without arguments", error) from error
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise CommandLineError(f"--model {name} returns a {kind}; let it return a torch.nn.Module")
    return shape_of(module, order=run_order(module))


def _unusable(name: str, fault: str, error: BaseException) -> CommandLineError:
    reason = " ".join(str(error).split())
    return CommandLineError(f"--model {name} {fault}: {type(error).__name__}: {reason}; correct it")


def _topology(
    config: Mapping[str, Any], world: int, tp: int | None, pp: int, backend: str
) -> Topology:
    from .plan.shapes import Topology

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
    from .plan.step import plan_step, refuse_auto, stages_for

    stages = stages_for(topology) if stage == _ALL else (int(stage),)
    refuse_auto(config, stages, origin)
    return [plan_step(model, config, topology, stage=one, origin=origin) for one in stages]


def _as_json(plans: list[Plan], model: ModelShape, topology: Topology) -> dict[str, Any]:
    return {
        "topology": asdict(topology),
        "parameters": model.num_parameters,
        "trained_parameters": model.num_trained,
        "plans": [
            {**asdict(plan), "wire_bytes": plan.wire_bytes, "volume_ratio": plan.volume_ratio}
            for plan in plans
        ],
    }
