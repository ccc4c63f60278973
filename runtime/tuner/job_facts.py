"""What the tuner must know of a live engine that stays as it is while the job runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .model_traits import model_traits
from .policy.numerics import JobFacts


def job_facts(engine: Any) -> JobFacts:
    """Read an engine whose ranks share nothing out but data and training state."""
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradient_width = int(engine.communication_data_type.itemsize)
    parameter_width = parameters[0].element_size() if parameters else gradient_width
    return JobFacts(
        world_size=dist.get_world_size(engine.seq_data_parallel_group),
        backend=str(dist.get_backend()),
        gradient_bytes=gradient_width * sum(map(_num_elements, trained)),
        parameter_bytes=parameter_width * sum(map(_num_elements, trained)),
        gradient_width=gradient_width,
        parameter_width=parameter_width,
        num_tensors=len(trained),
        traits=model_traits(engine.module),
    )


def _num_elements(parameter: Any) -> int:
    """Count what a parameter has when ZeRO 3 has not shared it out."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
