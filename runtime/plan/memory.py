"""What a rank holds in memory between steps, by category, on the device and on the host.

Source: section 5 of the ZeRO paper (arXiv 1910.02054): with P parameters over n ranks, 16-bit
training by Adam holds 2P of parameters, 2P of gradients and 12P of optimizer (fp32 copy, momentum,
variance); stage 1 divides the last by n, stage 2 the gradients too, stage 3 all. Where DeepSpeed
0.19.8 holds something else, the line that does so is named. Activations are not planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .options import Options
from .shapes import BYTES_OF, ModelShape

# Tensors that an optimizer keeps per parameter beside the weights. Adam's are the default.
_STATES = {
    "sgd": 0,
    "adagrad": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "deepspeedcpuadam": 2,
    "fusedadam": 2,
    "fusedlamb": 2,
    "lamb": 2,
}
_ADAMS_STATES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank. `host_bytes` is what offloading keeps in CPU memory.

    Categories of `device_bytes`: parameters, gathered (the most that ZeRO-3 has whole at any time),
    gradients, optimizer, comm_buffers (the buckets of gradients).
    """

    device_bytes: Mapping[str, int]
    host_bytes: int
    nvme_bytes: int

    @property
    def total_device_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.device_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How many elements a rank holds of what ZeRO divides.

    `part` is its share of the trained parameters, padding included, `whole` those parameters before
    sharing; `frozen` what it keeps of the others; `gathered` the most that ZeRO-3 has together.
    """

    part: int
    whole: int
    frozen: int
    gathered: int = 0


def optimizer_states(options: Options) -> int | None:
    """Return how many tensors per parameter the optimizer keeps; None if it is not known."""
    if options.optimizer == "sgd":
        return int(options.optimizer_momentum)
    return _STATES.get(options.optimizer or "")


def memory_of(model: ModelShape, options: Options, partition: Partition) -> MemoryPlan:
    """Plan the memory of one rank."""
    widest = max((BYTES_OF[p.dtype] for p in model.parameters), default=4)
    width = BYTES_OF[options.model_dtype] if options.model_dtype else widest
    kept = (partition.part if options.stage == 3 else partition.whole) + partition.frozen
    optimizer = _optimizer(options, partition, width)
    offload, offload_param = options.offload_optimizer, options.offload_param
    moved = round(optimizer * options.offload_optimizer_ratio) if offload != "none" else 0
    kept_away = kept * width if offload_param != "none" else 0
    host = _host_gradients(options, partition, width) if offload != "none" else 0
    host += moved * (offload == "cpu") + kept_away * (offload_param == "cpu")
    return MemoryPlan(
        device_bytes={
            "parameters": kept * width - kept_away,
            "gathered": partition.gathered * width,
            "gradients": _gradients(options, partition, width),
            "optimizer": optimizer - moved,
            "comm_buffers": _buffers(options, partition, width),
        },
        host_bytes=host,
        nvme_bytes=moved * (offload == "nvme") + kept_away * (offload_param == "nvme"),
    )


def _optimizer(options: Options, partition: Partition, width: int) -> int:
    """Return the bytes of the master copy and the optimizer's states.

    ZeRO keeps a flat copy for its partition in fp32 training too (stage_1_and_2.py:530).
    """
    states = optimizer_states(options)
    states = _ADAMS_STATES if states is None else states
    master = 0 if options.stage == 0 and not options.mixed_precision else 4
    if options.low_precision_master:
        master = width
    state_width = 2 if options.low_precision_states else 4
    return partition.part * (master + states * state_width)


def _gradients(options: Options, partition: Partition, width: int) -> int:
    accumulated = BYTES_OF[options.accumulation_dtype]
    if options.stage == 0:
        return partition.whole * width
    if options.uses_bf16_optimizer:  # whole fp32 gradients beside the model's own
        return partition.whole * (width + accumulated)  # fp32_groups_gradients_flat
    if options.stage == 1:
        return partition.whole * accumulated
    if options.offload_optimizer != "none":  # they leave the device bucket by bucket
        return 0
    return partition.part * accumulated


def _host_gradients(options: Options, partition: Partition, width: int) -> int:
    """Return the host's bytes beside the optimizer: fp32 gradients, and a staging copy."""
    staging = width if options.stage < 3 else BYTES_OF[options.accumulation_dtype]
    return partition.part * ((width if options.low_precision_master else 4) + staging)


def _buffers(options: Options, partition: Partition, width: int) -> int:
    """Return the bytes of reduction buckets, allocated whole however small the model is."""
    communicated = BYTES_OF[options.communication_dtype]
    if options.stage == 0 or options.uses_bf16_optimizer:  # flattened copies of gradients
        return min(partition.whole, 500_000_000) * communicated
    if options.stage == 3:
        return options.reduce_bucket_size * communicated * options.contiguous_gradients
    if not options.contiguous_gradients and options.offload_optimizer == "none":
        return 0
    staged = BYTES_OF[options.accumulation_dtype] if options.stage == 1 else width
    return options.reduce_bucket_size * staged * (2 if options.overlap_comm else 1)
