"""Reads single values of a ds config; an error names the file, the key and the value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import DsConfigError, shortened

AUTO = "auto"
MAX_SIZE = 2.0**63  # that of an int64, and DeepSpeed's default for "no limit"
STAGES = (0, 1, 2, 3)

# The keys of zero_optimization (deepspeed/runtime/zero/config.py); DeepSpeed rejects any other.
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
# DeepSpeed accepts these keys with and without the prefix "stage3_".
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
_KNOWN_KEYS = _ZERO_KEYS | _STAGE_3_KEYS | {f"stage3_{key}" for key in _STAGE_3_KEYS}


class ConfigReader:
    """Reads one JSON object of a ds config.

    Its sections share one list of the keys whose value is "auto".
    """

    def __init__(
        self,
        block: Mapping[str, Any],
        origin: str,
        path: tuple[str, ...] = (),
        auto_keys: list[str] | None = None,
    ) -> None:
        self.block = block
        self._origin = origin
        self._path = path
        self._auto_keys: list[str] = [] if auto_keys is None else auto_keys

    def section(self, *names: str) -> ConfigReader:
        """Return the reader of a nested object, under the first of `names` that is present."""
        name = next((name for name in names if name in self.block), names[0])
        block = self.block.get(name)
        block = {} if block is None else block
        if not isinstance(block, Mapping):
            self._reject_value(name, "give an object")
        return ConfigReader(block, self._origin, (*self._path, name), self._auto_keys)

    def zero(self) -> ConfigReader:
        """Return the reader of zero_optimization, which may also be a bool (the old form)."""
        block = self.block.get("zero_optimization")
        if isinstance(block, bool):
            block = {"stage": int(block)}
            return ConfigReader(block, self._origin, ("zero_optimization",), self._auto_keys)
        reader = self.section("zero_optimization")
        for key in reader.block:
            if key not in _KNOWN_KEYS:
                close = difflib.get_close_matches(key, _KNOWN_KEYS, n=1)
                advice = f"; did you mean {close[0]}?" if close else "; remove it"
                self.reject(f"zero_optimization.{key} is not a DeepSpeed key{advice}")
        return reader

    def stage(self) -> int:
        """Return the ZeRO stage.

        Raises:
            DsConfigError: It is not 0, 1, 2 or 3.
        """
        zero = self.zero()
        stage = zero.block.get("stage", 0)
        if isinstance(stage, bool) or stage not in STAGES:
            zero._reject_value("stage", "give 0, 1, 2 or 3")
        return int(stage)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean under a key; the default if it is absent or "auto"."""
        value = self._value(key, default)
        if not isinstance(value, bool | int):
            self._reject_value(key, "give true or false")
        return bool(value)

    def number(self, key: str, default: float, *, maximum: float = math.inf) -> float:
        """Return the number from 0 to `maximum` under a key; the default if absent or "auto"."""
        value = self._value(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._reject_value(key, "give a number")
        if not 0 <= number <= maximum:
            limits = "of 0 or more" if maximum == math.inf else f"from 0 to {maximum:g}"
            self._reject_value(key, f"give a number {limits}")
        return number

    def size(self, key: str, default: int, *aliases: str, minimum: int = 0) -> int:
        """Return the integer of `minimum` or more under a key; 5e8 is one, as in DeepSpeed."""
        key = next((name for name in (key, *aliases) if name in self.block), key)
        number = self.number(key, default)
        if key not in self.block or self.block[key] in (None, AUTO):
            return default
        if number > MAX_SIZE or number != int(number) or number < minimum:
            self._reject_value(key, f"give a whole number of {minimum} or more, at most 2^63")
        return int(number)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """Return the value of `choices` that the key's value selects; `default` if it is absent."""
        value = self._value(key, default)
        if not isinstance(value, str) or value.lower() not in choices:
            allowed = ", ".join(sorted(set(choices.values())))
            self._reject_value(key, f"give one of {allowed}")
        return choices[value.lower()]

    def raise_for_auto(self) -> None:
        """Raise if a value that was read is "auto".

        Raises:
            DsConfigError: Names the keys; only Hugging Face can fill them in.
        """
        if self._auto_keys:
            names = ", ".join(dict.fromkeys(self._auto_keys))
            self.reject(
                '"auto" is filled in by Hugging Face when training starts; '
                f"give a value here for {names}, or the options --grad-accum, --dtype and, "
                "with --sequence, --micro-batch"
            )

    def reject(self, problem: str) -> NoReturn:
        """Raise an error that begins with the file's name.

        Raises:
            DsConfigError: Always.
        """
        raise DsConfigError(f"{self._origin}: {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.block.get(key)
        if value == AUTO:
            self._auto_keys.append(".".join((*self._path, key)))
            return default
        return default if value is None else value

    def _reject_value(self, key: str, advice: str) -> NoReturn:
        name = ".".join((*self._path, key))
        self.reject(f"{name} is {shortened(self.block.get(key))}; {advice}")
