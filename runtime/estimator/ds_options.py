"""Reads the options of a ds config that decide a step's collectives and memory.

Defaults are DeepSpeed's. Features that the estimator does not model are listed by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from .config_reader import AUTO, ConfigReader

TOTAL_BATCH = "train_batch_size"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
_SEQUENCE_PARALLEL = "sequence_parallel_size"

_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip
_NO_LIMIT = 2**63 - 1
# Optimizers of which DeepSpeed takes a version for the CPU if they are offloaded.
_WITH_CPU_VERSION = ("adam", "adamw", "adagrad", "lion")

# Features whose collectives or memory are not modeled, by the key that enables them.
_UNMODELED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("expert_parallel", "enabled"), "expert parallelism"),
    (("torch_autocast", "enabled"), "torch_autocast"),
    (("compile", "deepcompile"), "DeepCompile"),
    (("hybrid_engine", "enabled"), "the hybrid engine"),
    (("data_efficiency", "enabled"), "data_efficiency"),
    (("zero_optimization", "zenflow"), "ZenFlow"),
    (("zero_optimization", "offload_optimizer", "super_offload"), "SuperOffload"),
    (("zero_optimization", "zero_quantized_weights"), "quantized weights (qwZ)"),
    (("zero_optimization", "zero_quantized_nontrainable_weights"), "quantized frozen weights"),
    (("zero_optimization", "zero_quantized_gradients"), "quantized gradients (qgZ)"),
    (("zero_optimization", "stage3_module_granularity_threshold"), "ZeRO-3 leaf modules"),
    (("zero_optimization", "leaf_module"), "ZeRO-3 leaf modules"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DsOptions:
    """The options of one ds config at one ZeRO stage. Sizes are in elements, as in DeepSpeed.

    Attributes:
        offload_optimizer: Place of the optimizer's states: "none", "cpu" or "nvme". Below stage 3
            DeepSpeed takes "nvme" as "cpu".
        offload_optimizer_buffers: Number of the buffers through which the optimizer's states are
            swapped to NVMe.
        offload_param_buffers: Number of such buffers for parameters.
        needs_cpu_optimizer: Whether stage 0 has an optimizer that updates parameters in CPU memory
            only: DeepSpeed selects it by `offload_optimizer`, which moves nothing at this stage.
        model_dtype: Data type of parameters in training; None where neither fp16 nor bf16 is
            enabled, so that parameters keep their own.
        set_keys: Keys of zero_optimization that the configuration sets.
        torch_adam: Whether DeepSpeed creates torch's Adam instead of its own.
        allows_untested: Whether ZeRO accepts optimizers that DeepSpeed does not list.
        low_precision_master: Whether a key for master weights in 16 bits is set, also if its
            precision is not enabled.
        mixes_masters: Whether both of these keys are set.
        sums_gradients: Whether gradients are summed over the ranks, not averaged.
        scales_before_reduction: Whether they are divided before the reduction, at least in part.
        immediate_grad_update: Whether BF16_Optimizer adds each gradient to its sums at once.
        pin_optimizer: Whether the configuration pins the offloaded optimizer's tensors.
        pin_param: Whether it pins offloaded parameters.
        is_pipeline: Whether the model is divided into the stages of a pipeline, or into one.
        on_cpu: Whether the ranks train on CPU.
        unmodeled: Enabled features that the estimate does not model.
    """

    stage: int
    is_pipeline: bool = False
    on_cpu: bool = False
    model_dtype: str | None = None
    accumulation_dtype: str = "fp32"
    communication_dtype: str = "fp32"
    checks_overflow: bool = False
    immediate_grad_update: bool = False
    gradient_clipping: float = 1.0
    optimizer: str | None = None
    optimizer_momentum: bool = False
    legacy_fusion: bool = False
    torch_adam: bool = False
    allows_untested: bool = False
    managed_accumulation: bool = True
    low_precision_master: bool = False
    low_precision_states: bool = False
    mixes_masters: bool = False
    sums_gradients: bool = False
    scales_before_reduction: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = True
    overlap_comm: bool = False
    compute_grad_norm: bool = True
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    reduce_bucket_size: int = 500_000_000
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = _NO_LIMIT
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    allgather_sequential: bool = False
    use_all_reduce_for_fetch: bool = False
    memory_efficient_linear: bool = True
    hpz_partition_size: int = 1
    offload_optimizer: str = "none"
    offload_optimizer_ratio: float = 1.0
    offload_optimizer_buffers: int = 4
    needs_cpu_optimizer: bool = False
    offload_param: str = "none"
    offload_param_buffers: int = 5
    offload_param_buffer_size: int = 100_000_000
    offload_param_max_in_cpu: int = 1_000_000_000
    pin_optimizer: bool = True
    pin_param: bool = True
    set_keys: frozenset[str] = frozenset()
    unmodeled: tuple[str, ...] = ()

    @property
    def mixed_precision(self) -> bool:
        """Whether parameters are in 16 bits, with a master copy in 32."""
        return self.model_dtype is not None

    @property
    def weights_first(self) -> bool:
        """Whether backward finishes a linear layer's weight first, as ZeRO-3's own function does.

        Source: zero/linear.py.
        """
        return self.stage == 3 and self.memory_efficient_linear

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are on the host or on NVMe."""
        return self.offload_optimizer != "none"

    @property
    def pins_optimizer(self) -> bool:
        """Whether tensors of an offloaded optimizer are pinned: never on CPU."""
        return self.offloads_optimizer and self.pin_optimizer and not self.on_cpu

    @property
    def pins_param(self) -> bool:
        """Whether partitions of offloaded parameters are pinned: never on CPU."""
        return self.offload_param != "none" and self.pin_param and not self.on_cpu

    @property
    def reduces_in_backward_order(self) -> bool:
        """Whether gradients are reduced in the order of backward, not of the parameters."""
        return self.stage >= 2 or (self.stage == 1 and self.overlap_comm)

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed runs BF16_Optimizer (engine.py:2303).

        It does so instead of ZeRO-1's optimizer, and for pipelines without ZeRO.
        """
        if self.model_dtype != "bf16":
            return False
        if self.stage == 0:
            return self.is_pipeline
        wide = self.accumulation_dtype == "fp32"
        return self.stage == 1 and wide and self.offload_optimizer != "cpu"


def read_options(
    config: Mapping[str, Any], *, stage: int | None = None, origin: str = "ds config"
) -> DsOptions:
    """Read the options of a configuration, at its own ZeRO stage or at another.

    Raises:
        DsConfigError: A value is invalid, or is "auto".
    """
    reader = ConfigReader(config, origin)
    options = options_from(reader, reader.stage() if stage is None else stage)
    reader.raise_for_auto()
    return options


def options_from(reader: ConfigReader, stage: int) -> DsOptions:
    """Read the options of one stage; the reader collects the keys whose value is "auto".

    Raises:
        DsConfigError: A value is invalid.
    """
    return DsOptions(
        stage=stage,
        **_precision(reader, stage),
        **_optimizer(reader),
        needs_cpu_optimizer=stage == 0 and _needs_cpu_optimizer(reader),
        **_zero_options(reader.zero(), stage),
        managed_accumulation=reader.flag("managed_gradient_accumulation", True),
        allows_untested=reader.flag("zero_allow_untested_optimizer"),
        **_reduction(reader),
        set_keys=frozenset(reader.zero().block),
        unmodeled=_unmodeled(reader.block),
    )


def _precision(reader: ConfigReader, stage: int) -> dict[str, Any]:
    bf16 = reader.section("bf16", "bfloat16")
    fp16 = reader.section("fp16")
    uses_fp16, uses_bf16 = fp16.flag("enabled"), bf16.flag("enabled")
    if uses_fp16 and uses_bf16:
        reader.reject("fp16.enabled and bf16.enabled are both true; enable one")
    model = "fp16" if uses_fp16 else "bf16" if uses_bf16 else None
    default = model or "fp32"
    checks = uses_fp16 or (uses_bf16 and stage < 3 and bf16.flag("check_grad_overflow", True))
    data_types = reader.section("data_types")
    parameters = data_types.choice("param_dtype", _DTYPES, default)
    if parameters != default:  # engine.py:1812
        reader.reject(
            f"data_types.param_dtype is {parameters}, but the model is trained in {default}; "
            "remove it, or set fp16.enabled or bf16.enabled accordingly"
        )
    narrow_masters = (
        fp16.flag("fp16_master_weights_and_grads"),
        bf16.flag("bf16_master_weights_and_grads"),
    )
    return {
        "model_dtype": model,
        "accumulation_dtype": data_types.choice("grad_accum_dtype", _DTYPES, default),
        "communication_dtype": reader.choice("communication_data_type", _DTYPES, default),
        "checks_overflow": checks,
        "immediate_grad_update": bf16.flag("immediate_grad_update"),
        "gradient_clipping": reader.number("gradient_clipping", 1.0),
        "low_precision_master": any(narrow_masters),
        "low_precision_states": bf16.flag("bf16_optimizer_states"),
        "mixes_masters": all(narrow_masters),
    }


def _reduction(reader: ConfigReader) -> dict[str, Any]:
    operation = reader.choice("gradient_allreduce_op", {"mean": "mean", "sum": "sum"}, "mean")
    is_prescaled = reader.flag("prescale_gradients")
    factor = reader.number("gradient_predivide_factor", 1.0)
    return {
        "sums_gradients": operation == "sum",
        "scales_before_reduction": is_prescaled or factor != 1.0,
    }


def _optimizer(reader: ConfigReader) -> dict[str, Any]:
    block = reader.section("optimizer")
    name = block.block.get("type")
    given = block.block.get("params")
    parameters = given if isinstance(given, Mapping) else {}
    return {
        "optimizer": str(name).lower() if name else None,
        "optimizer_momentum": bool(parameters.get("momentum")),
        "legacy_fusion": block.flag("legacy_fusion"),
        "torch_adam": bool(parameters.get("torch_adam")),
    }


def _needs_cpu_optimizer(reader: ConfigReader) -> bool:
    """Whether the optimizer is one that updates on the CPU only (engine.py:2342, 2384, 2496)."""
    if _optimizer_device(reader.zero(), 0) == "none":
        return False
    optimizer = _optimizer(reader)
    if optimizer["optimizer"] is None:  # the script creates it
        return reader.flag("zero_force_ds_cpu_optimizer", True)
    return optimizer["optimizer"] in _WITH_CPU_VERSION and not optimizer["torch_adam"]


def _optimizer_device(zero: ConfigReader, stage: int) -> str:
    legacy = "cpu" if zero.flag("cpu_offload") else "none"
    return zero.section("offload_optimizer").choice("device", _devices(stage), legacy)


def _devices(stage: int) -> dict[str, str]:
    return {"none": "none", "cpu": "cpu", "nvme": "nvme" if stage == 3 else "cpu"}


def _zero_options(zero: ConfigReader, stage: int) -> dict[str, Any]:
    optimizer = zero.section("offload_optimizer")
    # DeepSpeed checks these at every stage.
    options: dict[str, Any] = {
        "offload_optimizer_ratio": optimizer.number("ratio", 1.0, maximum=1.0),
        "compute_grad_norm": zero.flag("compute_grad_norm", True),
        "overlap_comm": zero.flag("overlap_comm", stage == 3),
    }
    device, is_pinned = _optimizer_device(zero, stage), optimizer.flag("pin_memory", True)
    if stage == 0:
        return options
    options |= {"offload_optimizer": device, "pin_optimizer": is_pinned}
    if stage == 3:
        options.update(_stage_3_options(zero))
        options.update(_stage_3_offload(zero))
    flags = {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "use_multi_rank_bucket_allreduce": True,
        "round_robin_gradients": False,
        "parameter_alignment": False,
    }
    options.update({key: zero.flag(key, default) for key, default in flags.items()})
    options["reduce_bucket_size"] = zero.size("reduce_bucket_size", 500_000_000, minimum=1)
    return options


def _stage_3_options(zero: ConfigReader) -> dict[str, Any]:
    sizes = {
        "prefetch_bucket_size": 50_000_000,
        "param_persistence_threshold": 100_000,
        "model_persistence_threshold": _NO_LIMIT,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
    }
    options: dict[str, Any] = {
        key: zero.size(f"stage3_{key}", default, key) for key, default in sizes.items()
    }
    sequential = zero.flag("stage3_allgather_sequential")
    if sequential:
        options["prefetch_bucket_size"] = 1  # engine.py:2742
    return {
        **options,
        "sub_group_size": zero.size("sub_group_size", 1_000_000_000),
        "hpz_partition_size": max(1, zero.size("zero_hpz_partition_size", 1)),  # 0 is off, too
        "allgather_sequential": sequential,
        "use_all_reduce_for_fetch": zero.flag("stage3_use_all_reduce_for_fetch_params"),
        "memory_efficient_linear": zero.flag("memory_efficient_linear", True),
    }


def _stage_3_offload(zero: ConfigReader) -> dict[str, Any]:
    optimizer, param = zero.section("offload_optimizer"), zero.section("offload_param")
    legacy_param = "cpu" if zero.flag("cpu_offload_param") else "none"
    return {
        "offload_optimizer_buffers": optimizer.size("buffer_count", 4),
        "offload_param": param.choice("device", _devices(3), legacy_param),
        "offload_param_buffers": param.size("buffer_count", 5),
        "offload_param_buffer_size": param.size("buffer_size", 100_000_000),
        "offload_param_max_in_cpu": param.size("max_in_cpu", 1_000_000_000),
        "pin_param": param.flag("pin_memory", True),
    }


def _unmodeled(config: Mapping[str, Any]) -> tuple[str, ...]:
    keys = []
    for path, name in _UNMODELED:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, False, 0):
            keys.append(name)
    if _optimizer_is(config, "muon"):
        keys.append("the Muon optimizer")
    if config.get(_SEQUENCE_PARALLEL) not in (None, 1):
        keys.append("sequence parallelism")
    return tuple(dict.fromkeys(keys))


def _optimizer_is(config: Mapping[str, Any], name: str) -> bool:
    block = config.get("optimizer")
    return isinstance(block, Mapping) and str(block.get("type", "")).lower() == name


def accumulation_steps(
    config: Mapping[str, Any], data_parallel: int, origin: str = "ds config"
) -> int:
    """Return the micro-batches of one step on one rank, derived as DeepSpeed does.

    Args:
        config: The DeepSpeed configuration.
        data_parallel: Number of data-parallel ranks.
        origin: Name of the configuration, for errors.

    Raises:
        DsConfigError: The batch sizes contradict each other, or are missing.
    """
    reader = ConfigReader(config, origin)
    read_accumulation_auto(reader)
    reader.raise_for_auto()
    ranks = batch_ranks(config, data_parallel, origin)
    total, micro, steps = (
        None if config.get(key) in (None, AUTO) else reader.size(key, 1, minimum=1)
        for key in (TOTAL_BATCH, MICRO_BATCH, ACCUMULATION)
    )
    if (
        total is None
        and micro is None
        and AUTO
        not in (
            config.get(TOTAL_BATCH),
            config.get(MICRO_BATCH),
        )
    ):
        reader.reject(f"{TOTAL_BATCH} or {MICRO_BATCH} is missing; give one of them")
    given = {key: size for key, size in ((MICRO_BATCH, micro), (ACCUMULATION, steps)) if size}
    if total is not None and _contradicts(total, prod(given.values()) * ranks, len(given)):
        factors = [f"{key} {size}" for key, size in given.items()]
        product = " x ".join([*factors, f"{ranks} data-parallel ranks"])
        # What DeepSpeed derives from the other sizes is not named: the user has not written it.
        relation = "" if len(given) == 2 else "a multiple of "
        result = f" = {prod(given.values()) * ranks}" if given else ""
        reader.reject(
            f"{TOTAL_BATCH} {total} is not {relation}{product}{result}; change one of them"
        )
    if steps is None:
        steps = total // (micro * ranks) if total and micro else 1
    return steps


def _contradicts(total: int, product: int, num_given: int) -> bool:
    """Whether a batch is not the product of both of its factors, or no multiple of those given."""
    return total != product if num_given == 2 else total % product != 0


def batch_ranks(config: Mapping[str, Any], data_parallel: int, origin: str = "ds config") -> int:
    """Return the number of ranks over which DeepSpeed divides a batch (runtime/config.py:469).

    The ranks of one sequence-parallel group share their samples. ZeRO partitions over them too.

    Raises:
        DsConfigError: The sequence-parallel groups do not divide the ranks.
    """
    reader = ConfigReader(config, origin)
    size = reader.size(_SEQUENCE_PARALLEL, 1, minimum=1)
    if data_parallel % size:
        reader.reject(
            f"{_SEQUENCE_PARALLEL} is {size}, which does not divide {data_parallel} data-parallel "
            "ranks; give a divisor"
        )
    return data_parallel // size


def read_accumulation_auto(reader: ConfigReader) -> None:
    """Record ACCUMULATION as "auto" in the reader if the other batch sizes do not determine it."""
    given = [key for key in (TOTAL_BATCH, MICRO_BATCH) if reader.block.get(key) not in (None, AUTO)]
    if len(given) < 2:
        reader.number(ACCUMULATION, 1)
