"""Properties of a live engine and its model that are constant while the job runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..common.group_backend import backend_name
from .policy.policy_types import JobFacts, ModelTraits

logger = logging.getLogger(__name__)

MAX_NAMED = 3  # modules named in a warning

# Classes of DeepSpeed, tutel, megablocks and transformers, such as MixtralSparseMoeBlock.
_EXPERTS = re.compile(r"MoE|MOE|Moe(?![a-z])|Experts|TopKGate|SwitchTransformers")


def job_facts(engine: Any, *, loss_decomposable: bool = True) -> JobFacts:
    """Return the properties of an engine whose ranks share only data and training state.

    Args:
        engine: The engine.
        loss_decomposable: As in `ModelTraits`.
    """
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradient_width = int(engine.communication_data_type.itemsize)
    parameter_width = parameters[0].element_size() if parameters else gradient_width
    return JobFacts(
        world_size=dist.get_world_size(engine.seq_data_parallel_group),
        backend=backend_name(),
        gradient_bytes=gradient_width * sum(map(_num_elements, trained)),
        parameter_bytes=sum(map(_num_bytes, trained)),
        gathered_bytes=sum(map(_num_bytes, parameters)),
        gradient_width=gradient_width,
        parameter_width=parameter_width,
        num_tensors=len(parameters),
        traits=model_traits(engine.module, loss_decomposable=loss_decomposable),
    )


def model_traits(model: torch.nn.Module, *, loss_decomposable: bool = True) -> ModelTraits:
    """Return what a model's modules and their attributes show.

    Code of a module beyond these is not inspected. Experts count with or without a capacity. Most
    have a capacity; experts without a capacity add a loss over all tokens that they get.

    Args:
        model: The model.
        loss_decomposable: Whether the loss of a batch is the weighted mean of its parts' losses.
    """
    modules = list(model.modules())
    return ModelTraits(
        dropout=any(_has_dropout(module) for module in modules),
        batch_statistics=any(_is_batch_norm(module) for module in modules),
        expert_capacity=any(_EXPERTS.search(type(module).__name__) for module in modules),
        loss_decomposable=loss_decomposable,
    )


def warn_of_batch_statistics(model: torch.nn.Module) -> None:
    """Warn of modules that normalize over the samples of a micro-batch."""
    names = [name for name, module in model.named_modules() if _is_batch_norm(module)]
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        logger.warning(
            "%s%s normalize over the samples of a micro-batch: the micro-batch size changes their "
            "output, and a replayed window updates their running statistics twice. Use LayerNorm "
            "or GroupNorm, or keep micro-batches as they are",
            ", ".join(names[:MAX_NAMED]),
            more,
        )


def _num_elements(parameter: Any) -> int:
    """Return the elements of a whole parameter, also where ZeRO 3 has partitioned it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _num_bytes(parameter: Any) -> int:
    return _num_elements(parameter) * int(parameter.element_size())


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def _has_dropout(module: torch.nn.Module) -> bool:
    """Whether a module is a dropout layer, or has a dropout rate."""
    return any(rate > 0 for rate in _rates(module))


def _rates(module: torch.nn.Module) -> Iterator[float]:
    is_dropout = "drop" in type(module).__name__.lower()
    for name, value in vars(module).items():
        if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
            yield value
