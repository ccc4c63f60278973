"""Fills in "auto" in a ds config as Hugging Face does when training starts.

Values that follow from the model are computed as in transformers' `integrations/deepspeed.py`.
Values of TrainingArguments are given by options. Everything else stays "auto", and is refused if an
estimate needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import CommandLineError
from ...estimator.config_reader import AUTO
from ...estimator.ds_options import ACCUMULATION, MICRO_BATCH
from .inputs import EstimatedModel

# TrainingArguments.max_grad_norm, which Hugging Face uses if the script does not set it.
_MAX_GRAD_NORM = 1.0
_TYPICAL_WEIGHT = "attention.out"  # of typical_transformer; its sides are the hidden size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingValues:
    """Values of Hugging Face's TrainingArguments, from options; None where not given.

    Attributes:
        dtype: "fp32", "fp16" or "bf16".
    """

    accumulation: int | None = None
    micro_batch: int | None = None
    dtype: str | None = None


def fill_in(
    config: Mapping[str, Any], given: TrainingValues, model: EstimatedModel
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of the config with values in place of "auto", and these values by key.

    Raises:
        CommandLineError: An option is given, but the config has no "auto" for it.
    """
    filled, values = copy.deepcopy(dict(config)), {}
    for path, value in _values(given, model):
        block: Any = filled
        for key in path[:-1]:
            block = block.get(key) if isinstance(block, Mapping) else None
        if isinstance(block, dict) and block.get(path[-1]) == AUTO:
            block[path[-1]] = value
            values[".".join(path)] = value
    _check_used(given, values)
    return filled, values


def _check_used(given: TrainingValues, values: Mapping[str, Any]) -> None:
    chosen = {"bf16": ("bf16.enabled", "bfloat16.enabled"), "fp16": ("fp16.enabled",)}
    precisions = [key for keys in chosen.values() for key in keys]
    for option, value, keys in (
        ("--grad-accum", given.accumulation, [ACCUMULATION]),
        ("--dtype", given.dtype, chosen.get(given.dtype or "", precisions)),
    ):
        if value is not None and values.keys().isdisjoint(keys):
            raise CommandLineError(
                f'{option} {value}: the configuration has no "auto" at {" or ".join(keys)}; leave '
                "the option out, or change the configuration"
            )


def _values(given: TrainingValues, model: EstimatedModel) -> Iterator[tuple[tuple[str, ...], Any]]:
    if given.accumulation is not None:
        yield (ACCUMULATION,), given.accumulation
    if given.micro_batch is not None:
        yield (MICRO_BATCH,), given.micro_batch
    if given.dtype is not None:
        for block in ("bf16", "bfloat16", "fp16"):
            yield (block, "enabled"), block[:2] == given.dtype[:2] and given.dtype != "fp32"
    yield ("gradient_clipping",), _MAX_GRAD_NORM
    hidden = _hidden_size(model)
    if hidden is not None:
        yield ("zero_optimization", "reduce_bucket_size"), hidden * hidden
        yield ("zero_optimization", "stage3_prefetch_bucket_size"), int(0.9 * hidden * hidden)
        yield ("zero_optimization", "stage3_param_persistence_threshold"), 10 * hidden


def _hidden_size(model: EstimatedModel) -> int | None:
    """Return the hidden size of a model of Hugging Face or of a typical transformer."""
    if model.module is None:
        weights = (each for each in model.shape.parameters if each.name.endswith(_TYPICAL_WEIGHT))
        weight = next(weights, None)
        return None if weight is None else weight.shape[0]
    config: Any = getattr(model.module, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        sizes = getattr(each, "hidden_sizes", None)
        size = getattr(each, "hidden_size", None) or (max(sizes) if sizes else None)
        if isinstance(size, int):
            return size
    return None
