"""How far ahead ZeRO 3 gathers parameters, how long it keeps them, and which it never lets go.

A new prefetch or distance takes effect in the next forward, once DeepSpeed has seen the order of
the modules twice. Fewer kept parameters can mean more or fewer gathers: those that never go are
gathered one by one after each update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ...common.deepspeed_internals import (
    COORDINATOR,
    PARAMETER_OFFLOAD,
    ZERO_3,
    attribute,
    forget_releases,
    remembered_releases,
)
from ...common.deepspeed_internals_live_settings import missing
from ...common.undo import Undo, chain, own_attributes, restore_attributes, set_attributes
from .knob import Knob, Value
from .zero_optimizer import coordinator, num_elements, of_stage_3, total_elements

NOT_PARTITIONED = "only stage 3 gathers parameters"


def _refusal(name: str, engine: Any) -> str | None:
    zero_3 = of_stage_3(engine)
    if zero_3 is None:
        return NOT_PARTITIONED
    gone = missing(zero_3, ZERO_3, "parameter_offload") or missing(
        zero_3.parameter_offload, PARAMETER_OFFLOAD, "param_coordinator"
    )
    if gone is None:
        gone = missing(coordinator(zero_3), COORDINATOR, name, "__params_to_release")
    if gone is None and remembered_releases() is None:
        return "this DeepSpeed remembers elsewhere what it releases"
    if gone is None and _from_nvme(engine):
        return "parameters come from NVMe, through as many buffers as it was set to at the start"
    return gone


def _from_nvme(engine: Any) -> bool:
    return any(
        getattr(parameter, "nvme_swapper", None) is not None
        for parameter in engine.module.parameters()
    )


def _get(name: str, engine: Any) -> int:
    return int(getattr(coordinator(engine.optimizer), attribute(COORDINATOR, name)))


def _change(name: str, engine: Any, value: Value) -> Undo:
    undo = set_attributes(
        coordinator(engine.optimizer), **{attribute(COORDINATOR, name): int(value)}
    )
    forget_releases()
    return chain([forget_releases, undo])


def _always(_: Any, __: Value) -> bool:
    return True


def _prefetch_memory(engine: Any, value: Value) -> int | None:
    """At most the whole model is ahead of the module that runs."""
    parameters = list(engine.module.parameters())
    flat = total_elements(parameters)
    itemsize = max((parameter.element_size() for parameter in parameters), default=0)
    return (min(value, flat) - min(_get("__prefetch_bucket_sz", engine), flat)) * itemsize


def _coordinator_knob(
    name: str, attribute: str, memory: Callable[[Any, Value], int | None] | None = None
) -> Knob:
    return Knob(
        name=name,
        least=0,
        exact=True,
        refusal=partial(_refusal, attribute),
        get=partial(_get, attribute),
        change=partial(_change, attribute),
        holds=_always,
        memory=memory or (lambda _, __: None),
    )


def _persistence_refusal(engine: Any) -> str | None:
    gone = _refusal("__params_to_release", engine)
    if gone is not None:
        return gone
    names = (
        "mark_persistent_parameters",
        "persistent_parameters",
        "param_numel_persistence_threshold",
        "model_persistence_threshold",
    )
    gone = missing(engine.optimizer.parameter_offload, PARAMETER_OFFLOAD, *names)
    if gone is None and engine.zero_offload_param() is not None:
        return "parameters lie on the host, where those that never go were chosen at the start"
    return gone


def _change_persistence(engine: Any, value: Value) -> Undo:
    zero_3 = engine.optimizer
    offload = zero_3.parameter_offload
    parameters = list(engine.module.parameters())
    flags = [(weakref.ref(each), own_attributes(each, ["ds_persist"])) for each in parameters]

    def undo_flags() -> None:
        for reference, before in flags:
            parameter = reference()
            if parameter is not None:
                restore_attributes(parameter, before)
        forget_releases()

    for parameter in parameters:
        parameter.ds_persist = False
    kept = offload.mark_persistent_parameters(int(value), offload.model_persistence_threshold)
    forget_releases()
    return chain(
        [
            undo_flags,
            set_attributes(
                offload, persistent_parameters=kept, param_numel_persistence_threshold=int(value)
            ),
            set_attributes(zero_3, persistent_parameters=kept),
        ]
    )


def _persistence_holds(engine: Any, _: Value) -> bool:
    kept = {id(parameter) for parameter in engine.optimizer.persistent_parameters}
    return all(
        bool(getattr(parameter, "ds_persist", False)) == (id(parameter) in kept)
        for parameter in engine.module.parameters()
    )


def _persistence_memory(engine: Any, value: Value) -> int | None:
    """Parameters that stay whole between steps, beside their partitions."""
    offload = engine.optimizer.parameter_offload
    left, now = int(offload.model_persistence_threshold), 0
    then = 0
    for parameter in engine.module.parameters():
        size, itemsize = num_elements(parameter), parameter.element_size()
        now += size * itemsize * bool(parameter.ds_persist)
        if size <= min(value, left):
            left -= size
            then += size * itemsize
    return then - now


PREFETCH_BUCKET_SIZE = _coordinator_knob(
    "prefetch_bucket_size", "__prefetch_bucket_sz", _prefetch_memory
)
MAX_LIVE_PARAMETERS = _coordinator_knob("max_live_parameters", "__max_n_available_params")
MAX_REUSE_DISTANCE = _coordinator_knob("max_reuse_distance", "__max_reuse_dist_in_numel")
PARAM_PERSISTENCE_THRESHOLD = Knob(
    name="param_persistence_threshold",
    least=0,
    exact=True,
    refusal=_persistence_refusal,
    get=lambda engine: int(engine.optimizer.parameter_offload.param_numel_persistence_threshold),
    change=_change_persistence,
    holds=_persistence_holds,
    memory=_persistence_memory,
)
