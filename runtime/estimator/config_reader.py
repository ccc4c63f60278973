"""Reads values out of a DeepSpeed configuration, with errors that name file, key and value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import DsConfigError

AUTO = "auto"
STAGES = (0, 1, 2, 3)

# The keys of zero_optimization (deepspeed/runtime/zero/config.py); DeepSpeed refuses any other.
_ZERO_KEYS = frozenset(
    (
        "allgather_bucket_size",
        "allgather_partitions",
        "compute_grad_norm",
        "contiguous_gradients",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "legacy_stage1",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage",
        "sub_group_size",
        "stage3_gather_fp16_weights_on_model_save",
        "use_multi_rank_bucket_allreduce",
        "zenflow",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    )
)
# These have an alias with "stage3_" before it; DeepSpeed takes both.
_STAGE_3_KEYS = frozenset(
    (
        "allgather_sequential",
        "gather_16bit_weights_on_model_save",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "use_all_reduce_for_fetch_params",
    )
)
_KNOWN = _ZERO_KEYS | _STAGE_3_KEYS | {f"stage3_{key}" for key in _STAGE_3_KEYS}


class ConfigReader:
    """Reads one object of a configuration; sections of it share its list of "auto" values."""

    def __init__(
        self,
        block: Mapping[str, Any],
        origin: str,
        path: tuple[str, ...] = (),
        autos: list[str] | None = None,
    ) -> None:
        self.block = block
        self._origin = origin
        self._path = path
        self._autos: list[str] = [] if autos is None else autos

    def section(self, *names: str) -> ConfigReader:
        """Return the reader of an object in this one, by the first of its names that is there."""
        name = next((name for name in names if name in self.block), names[0])
        block = self.block.get(name)
        block = {} if block is None else block
        if not isinstance(block, Mapping):
            self._refuse_value(name, "give an object")
        return ConfigReader(block, self._origin, (*self._path, name), self._autos)

    def zero(self) -> ConfigReader:
        """Return the reader of zero_optimization, in the old form of a bool too."""
        block = self.block.get("zero_optimization")
        if isinstance(block, bool):
            block = {"stage": int(block)}
            return ConfigReader(block, self._origin, ("zero_optimization",), self._autos)
        reader = self.section("zero_optimization")
        for key in reader.block:
            if key not in _KNOWN:
                close = difflib.get_close_matches(key, _KNOWN, n=1)
                hint = f"; did you mean {close[0]}?" if close else "; take it out"
                self.refuse(f"zero_optimization.{key} is no key that DeepSpeed knows{hint}")
        return reader

    def stage(self) -> int:
        """Return the ZeRO stage.

        Raises:
            DsConfigError: There is no such stage.
        """
        zero = self.zero()
        stage = zero.block.get("stage", 0)
        if isinstance(stage, bool) or stage not in STAGES:
            zero._refuse_value("stage", "give 0, 1, 2 or 3")
        return int(stage)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch."""
        value = self._value(key, default)
        if not isinstance(value, bool | int):
            self._refuse_value(key, "give true or false")
        return bool(value)

    def number(self, key: str, default: float) -> float:
        """Return a number that is not negative."""
        value = self._value(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            self._refuse_value(key, "give a number")
        if not number >= 0:
            self._refuse_value(key, "give a number of 0 or more")
        return number

    def size(self, key: str, default: int, *aliases: str, least: int = 0) -> int:
        """Return a whole number; DeepSpeed takes 5e8 for one too."""
        key = next((name for name in (key, *aliases) if name in self.block), key)
        number = self.number(key, default)
        if key not in self.block or self.block[key] in (None, AUTO):
            return default
        if number != int(number) or number < least:
            self._refuse_value(key, f"give a whole number of {least} or more")
        return int(number)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """Return one of several words."""
        value = self._value(key, default)
        if not isinstance(value, str) or value.lower() not in choices:
            allowed = ", ".join(sorted(set(choices.values())))
            self._refuse_value(key, f"give one of {allowed}")
        return choices[value.lower()]

    def raise_for_auto(self) -> None:
        """Name the values that only Hugging Face could fill in, if any was asked for.

        Raises:
            DsConfigError: There are some.
        """
        if self._autos:
            names = ", ".join(dict.fromkeys(self._autos))
            self.refuse(
                '"auto" is filled in by Hugging Face when training starts; '
                f"give a value here for {names}"
            )

    def refuse(self, fault: str) -> NoReturn:
        """Raise what is wrong, with the file.

        Raises:
            DsConfigError: Always.
        """
        raise DsConfigError(f"{self._origin}: {fault}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.block.get(key)
        if value == AUTO:
            self._autos.append(".".join((*self._path, key)))
            return default
        return default if value is None else value

    def _refuse_value(self, key: str, advice: str) -> NoReturn:
        name = ".".join((*self._path, key))
        self.refuse(f"{name} is {self.block.get(key)!r}; {advice}")
