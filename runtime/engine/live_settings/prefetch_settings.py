"""Sets ZeRO 3's parameter gathering live: prefetch, live parameters, reuse, persistence.

A new prefetch size or reuse distance takes effect in the next forward, once DeepSpeed has traced
the order of the modules twice. Fewer persistent parameters can mean more or fewer gathers, because
the persistent parameters are gathered one by one after each update.
"""

from __future__ import annotations

import weakref
from typing import Any

from ...common.deepspeed_internals import (
    COORDINATOR,
    PARAMETER_OFFLOAD,
    ZERO_3,
    attribute,
    clear_release_cache,
    missing_reason,
    release_cache,
)
from ...common.undo import Undo, chain, own_attributes, restore_attributes, set_attributes
from .live_setting import LiveSetting, SettingValue
from .zero_optimizer import (
    largest_itemsize,
    num_elements,
    param_coordinator,
    total_elements,
    zero_3_optimizer,
)


class _CoordinatorSetting(LiveSetting):
    """Sets a number of elements that the parameter coordinator has as a private attribute.

    Attributes:
        private_name: The attribute, as spelled in the class's own source.
    """

    minimum = 0
    private_name: str

    def _unsupported_reason(self, engine: Any) -> str | None:
        return _missing_from_coordinator(engine, self.private_name)

    def get(self, engine: Any) -> int:
        coordinator = param_coordinator(engine.optimizer)
        return int(getattr(coordinator, attribute(COORDINATOR, self.private_name)))

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        undo = set_attributes(
            param_coordinator(engine.optimizer),
            **{attribute(COORDINATOR, self.private_name): int(value)},
        )
        clear_release_cache()
        return chain([clear_release_cache, undo])


class _PrefetchBucketSize(_CoordinatorSetting):
    """Sets the number of parameter elements that ZeRO 3 gathers ahead of their use."""

    name = "prefetch_bucket_size"
    private_name = "__prefetch_bucket_sz"

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        """Return the change in bytes; at most the whole model can be prefetched."""
        parameters = list(engine.module.parameters())
        total = total_elements(parameters)
        return (min(value, total) - min(self.get(engine), total)) * largest_itemsize(parameters)


class _MaxLiveParameters(_CoordinatorSetting):
    """Sets the number of gathered parameter elements above which ZeRO 3 releases parameters."""

    name = "max_live_parameters"
    private_name = "__max_n_available_params"


class _MaxReuseDistance(_CoordinatorSetting):
    """Sets the number of elements within which a parameter that is used again is not released."""

    name = "max_reuse_distance"
    private_name = "__max_reuse_dist_in_numel"


class _ParamPersistenceThreshold(LiveSetting):
    """Sets the size in elements up to which ZeRO 3 keeps a parameter gathered on all ranks."""

    name = "param_persistence_threshold"
    minimum = 0

    def _unsupported_reason(self, engine: Any) -> str | None:
        missing = _missing_from_coordinator(engine, "__params_to_release")
        if missing is not None:
            return missing
        names = (
            "mark_persistent_parameters",
            "persistent_parameters",
            "param_numel_persistence_threshold",
            "model_persistence_threshold",
        )
        missing = missing_reason(engine.optimizer.parameter_offload, PARAMETER_OFFLOAD, *names)
        if missing is None and engine.zero_offload_param() is not None:
            return "parameters are offloaded; their persistent ones were chosen at the start"
        return missing

    def get(self, engine: Any) -> int:
        return int(engine.optimizer.parameter_offload.param_numel_persistence_threshold)

    def _set(self, engine: Any, value: SettingValue) -> Undo:
        zero_3 = engine.optimizer
        offload = zero_3.parameter_offload
        parameters = list(engine.module.parameters())
        flags = [(weakref.ref(each), own_attributes(each, ["ds_persist"])) for each in parameters]

        def undo_flags() -> None:
            for reference, before in flags:
                parameter = reference()
                if parameter is not None:
                    restore_attributes(parameter, before)
            clear_release_cache()

        for parameter in parameters:
            parameter.ds_persist = False
        kept = offload.mark_persistent_parameters(int(value), offload.model_persistence_threshold)
        clear_release_cache()
        return chain(
            [
                undo_flags,
                set_attributes(
                    offload,
                    persistent_parameters=kept,
                    param_numel_persistence_threshold=int(value),
                ),
                set_attributes(zero_3, persistent_parameters=kept),
            ]
        )

    def _is_consistent(self, engine: Any, value: SettingValue) -> bool:
        kept = {id(parameter) for parameter in engine.optimizer.persistent_parameters}
        return all(
            bool(getattr(parameter, "ds_persist", False)) == (id(parameter) in kept)
            for parameter in engine.module.parameters()
        )

    def _memory_bytes(self, engine: Any, value: SettingValue) -> int | None:
        """Count the parameters that stay whole between steps, next to their partitions."""
        offload = engine.optimizer.parameter_offload
        budget = int(offload.model_persistence_threshold)
        bytes_now = bytes_then = 0
        for parameter in engine.module.parameters():
            size, itemsize = num_elements(parameter), parameter.element_size()
            bytes_now += size * itemsize * bool(parameter.ds_persist)
            if size <= min(value, budget):
                budget -= size
                bytes_then += size * itemsize
        return bytes_then - bytes_now


PREFETCH_BUCKET_SIZE_SETTING = _PrefetchBucketSize()
MAX_LIVE_PARAMETERS_SETTING = _MaxLiveParameters()
MAX_REUSE_DISTANCE_SETTING = _MaxReuseDistance()
PARAM_PERSISTENCE_THRESHOLD_SETTING = _ParamPersistenceThreshold()


def _missing_from_coordinator(engine: Any, private_name: str) -> str | None:
    zero_3 = zero_3_optimizer(engine)
    if zero_3 is None:
        return "only stage 3 gathers parameters"
    missing = missing_reason(zero_3, ZERO_3, "parameter_offload") or missing_reason(
        zero_3.parameter_offload, PARAMETER_OFFLOAD, "param_coordinator"
    )
    if missing is None:
        names = (private_name, "__params_to_release")
        missing = missing_reason(param_coordinator(zero_3), COORDINATOR, *names)
    if missing is None and release_cache() is None:
        return "this DeepSpeed does not cache the parameters to release where expected"
    if missing is None and _is_on_nvme(engine):
        return "parameters are on NVMe, where the number of buffers is fixed at the start"
    return missing


def _is_on_nvme(engine: Any) -> bool:
    return any(
        getattr(parameter, "nvme_swapper", None) is not None
        for parameter in engine.module.parameters()
    )
