"""Computes the memory of one rank: by category, at the peak, and the micro-batch that fits.

This is an estimate from shapes. `runtime/memory/engine_memory.py` measures a live engine.

Source: section 5 of the ZeRO paper (arXiv 1910.02054). With P parameters over n ranks, 16-bit
training with Adam holds 2P bytes of parameters, 2P of gradients and 12P of optimizer (fp32 copy,
momentum, variance). Stage 1 divides the optimizer by n, stage 2 the gradients too, stage 3 all.
Where DeepSpeed 0.19.8 differs from this, a comment names the line that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .ds_options import DsOptions
from .gradient_memory import gradient_memory
from .model_shape import BYTES_OF, ModelShape, ParameterShape
from .optimizer_places import PartitionSizes, master_copy_width, optimizer_places
from .pinned_memory import pinning_bytes

# Tensors that an optimizer keeps per parameter in addition to the weights. Adam's are the default.
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
_ADAM_STATES = 2

# Categories of `MemoryEstimate.device_bytes` that only backward has; the step frees or copies them.
_BACKWARD_ONLY = ("gathered", "gradients", "comm_buffers")

Moment = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The estimated bytes of one rank, without activations.

    Attributes:
        device_bytes: Bytes at the end of backward, by category: parameters (with the model's
            buffers), gathered (the most that ZeRO-3 has gathered at once, with the buffer of a
            gather, and hpZ's secondary partitions), gradients, optimizer, comm_buffers (gradient
            buckets, messages, temporary copies).
        step_bytes: Gradients and their copies on the device in the optimizer's step, and hpZ's
            secondary partitions, which the end of the step frees.
        forward_bytes: Gradients and buffers that are present during forward.
        bucket_bytes: Buckets that the first gradient of backward allocates in addition.
        resting_bytes: All bytes on the device between steps.
        host_bytes: Offloaded bytes in CPU memory, what pinning adds to them, and the buffers for
            swaps to NVMe.
        nvme_bytes: Offloaded bytes on NVMe.
        accumulated_device_bytes: Additional bytes at the end of backward, if a step has several
            micro-batches.
        accumulated_forward_bytes: Additional bytes during forward, from the second micro-batch on.
        accumulated_host_bytes: Additional bytes in CPU memory, if there are several.
    """

    device_bytes: Mapping[str, int]
    step_bytes: int
    forward_bytes: int
    bucket_bytes: int
    resting_bytes: int
    host_bytes: int
    nvme_bytes: int
    accumulated_device_bytes: int = 0
    accumulated_forward_bytes: int = 0
    accumulated_host_bytes: int = 0

    @property
    def backward_bytes(self) -> int:
        """The bytes on the device at the end of backward, without parameters and optimizer."""
        return sum(self.device_bytes[category] for category in _BACKWARD_ONLY)

    @property
    def permanent_bytes(self) -> int:
        """The bytes on the device at all times: parameters and optimizer states."""
        return sum(self.device_bytes.values()) - self.backward_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The bytes of one micro-batch's activations at their maximum, for samples of `tokens` each.

    Their bytes are linear in the number of samples. The maximum is at the start of backward, which
    then frees those of the loss.

    Attributes:
        tokens: Length of a sample.
        sample_bytes: Bytes per sample.
        fixed_bytes: Bytes that do not depend on the number of samples.
        loss_sample_bytes: Bytes per sample by which the maximum is lower from the first finished
            gradient on: those of the loss.
        loss_fixed_bytes: The same of the fixed bytes; the gradient itself may make it negative.
        recomputed: The activations if each layer is recomputed in backward; None if unknown.
    """

    tokens: int
    sample_bytes: int
    fixed_bytes: int = 0
    loss_sample_bytes: int = 0
    loss_fixed_bytes: int = 0
    recomputed: Activations | None = None

    def bytes_of(self, samples: int) -> int:
        """Return the bytes of a micro-batch of this many samples."""
        return self.fixed_bytes + samples * self.sample_bytes

    def loss_bytes_of(self, samples: int) -> int:
        """Return the bytes by which the maximum is lower from the first finished gradient on."""
        return self.loss_fixed_bytes + samples * self.loss_sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The bytes at a step's peak, and when it is: in a pass, or in the step."""

    device_bytes: int
    host_bytes: int
    moment: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPartition:
    """Numbers of elements that one rank holds after ZeRO's partitioning.

    Attributes:
        part: This rank's share of the trained parameters, padding included.
        whole: Trained parameters before partitioning.
        ranks: Number of ranks over which ZeRO partitions.
        frozen_bytes: Bytes that this rank keeps of the frozen parameters.
        gathered_bytes: The most bytes that ZeRO-3 has gathered at once.
        secondary: hpZ's secondary partitions.
        sub_groups: In stage 3 the parts of the parameters of each sub-group of the optimizer.
    """

    part: int
    whole: int
    ranks: int
    frozen_bytes: int
    gathered_bytes: int = 0
    secondary: SecondaryPartition | None = None
    sub_groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryPartition:
    """Numbers of elements, or bytes, of one rank's secondary partitions with hpZ.

    A parameter gets its secondary partition when it is released (partition_parameters.py:1900). The
    end of the step discards those of trained parameters (stage3.py:755).

    Attributes:
        released: Of trained parameters that forward and backward release.
        persistent: Of trained parameters that only the step releases.
        frozen_bytes: Bytes of frozen parameters, which are kept between steps.
    """

    released: int
    persistent: int
    frozen_bytes: int


def peak_of(
    memory: MemoryEstimate,
    *,
    micro_batches: int = 1,
    activations: Activations | None = None,
    samples: int = 0,
) -> Peak:
    """Return the bytes and the moment of a step's peak.

    Backward allocates its buckets at its first gradient. It then frees activations while it fills
    gradients, so the larger of its two ends counts.

    Args:
        memory: The rank's memory without activations.
        micro_batches: Micro-batches of one step on one rank.
        activations: Activations of a micro-batch; None to leave them out.
        samples: Samples of a micro-batch.
    """
    accumulates = micro_batches > 1
    activation_bytes = activations.bytes_of(samples) if activations else 0
    loss_bytes = activations.loss_bytes_of(samples) if activations else 0
    gathered = memory.device_bytes["gathered"]
    forward = gathered + memory.forward_bytes + accumulates * memory.accumulated_forward_bytes
    forward += activation_bytes
    first_gradient = forward - loss_bytes + memory.bucket_bytes
    end = memory.backward_bytes + accumulates * memory.accumulated_device_bytes
    moments: dict[Moment, int] = {
        "forward": forward,
        "backward": max(first_gradient, end),
        "step": memory.step_bytes,
    }
    moment = max(moments, key=lambda name: moments[name])
    return Peak(
        device_bytes=memory.permanent_bytes + moments[moment],
        host_bytes=memory.host_bytes + accumulates * memory.accumulated_host_bytes,
        moment=moment,
    )


def largest_micro_batch(
    memory: MemoryEstimate, activations: Activations, limit_bytes: int, *, micro_batches: int = 1
) -> int:
    """Return the samples of the largest micro-batch that fits on the device; 0 if none does."""

    def fits(samples: int) -> bool:
        peak = peak_of(
            memory, micro_batches=micro_batches, activations=activations, samples=samples
        )
        return peak.device_bytes <= limit_bytes

    if not fits(1):
        return 0
    fitting, too_many = 1, limit_bytes // max(1, activations.sample_bytes) + 2
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def estimate_memory(
    model: ModelShape, options: DsOptions, partition: ModelPartition
) -> MemoryEstimate:
    """Return the bytes of one rank by category, without activations."""
    width = _widest((p for p in model.parameters if p.is_trained), options)
    held = partition.part if options.stage == 3 else partition.whole
    sizes = PartitionSizes(
        part=partition.part, whole=partition.whole, width=width, sub_groups=partition.sub_groups
    )
    gradients = gradient_memory(model, options, sizes)
    places = optimizer_places(options, sizes)
    state_width, master = _state_width(options, width), master_copy_width(options, width)
    optimizer, offload_param = places.device * state_width, options.offload_param
    gather_buffer = _gather_buffer_bytes(model, options, partition)
    parameters = held * width + partition.frozen_bytes
    moved_parameters = parameters if offload_param != "none" else 0
    parameters -= moved_parameters
    secondary = partition.secondary or SecondaryPartition(released=0, persistent=0, frozen_bytes=0)
    in_passes, in_step = secondary.released, secondary.released + secondary.persistent
    secondary_width = width * (offload_param == "none")
    parameters += secondary.frozen_bytes * (offload_param == "none")
    parameters += sum(buffer.bytes_in_training(options.model_dtype) for buffer in model.buffers)
    return MemoryEstimate(
        device_bytes={
            "parameters": parameters,
            # In forward, the parameters that are not released yet have no secondary partition.
            "gathered": partition.gathered_bytes + gather_buffer + in_passes * secondary_width,
            "gradients": gradients.kept,
            "optimizer": optimizer,
            # Gathering and reducing do not reach their maxima at the same moment.
            "comm_buffers": gradients.buffers + max(0, gradients.transient - gather_buffer),
        },
        # The step first frees gathered parameters (stage3.py, step).
        step_bytes=gradients.in_step + in_step * secondary_width,
        forward_bytes=gradients.in_forward,
        bucket_bytes=max(0, gradients.buffers - gradients.in_forward),
        resting_bytes=parameters
        + optimizer
        + gradients.in_forward
        + _persistent_bytes(model, options),
        host_bytes=gradients.host
        + places.host * state_width
        + _swap_bytes(options, sizes)
        + pinning_bytes(model, options, sizes, partition.ranks)
        + (moved_parameters + in_step * width + secondary.frozen_bytes) * (offload_param == "cpu"),
        nvme_bytes=places.nvme * state_width
        + (places.nvme - places.unswapped) * master  # gradients
        + moved_parameters * (offload_param == "nvme"),
        accumulated_device_bytes=gradients.accumulated,
        accumulated_forward_bytes=gradients.accumulated_in_forward,
        accumulated_host_bytes=gradients.host_accumulated,
    )


def _widest(parameters: Iterable[ParameterShape], options: DsOptions) -> int:
    """Return the bytes of one element of the parameter with the widest data type."""
    widths = (parameter.width_in_training(options.model_dtype) for parameter in parameters)
    return max(widths, default=BYTES_OF["fp32"])


def optimizer_states(options: DsOptions) -> int | None:
    """Return how many tensors per parameter the optimizer keeps; None if unknown."""
    if options.optimizer == "sgd":
        return int(options.optimizer_momentum)
    return _STATES.get(options.optimizer or "")


def _state_width(options: DsOptions, width: int) -> int:
    """Return the bytes of the master copy and the optimizer's states for one element.

    ZeRO keeps a flat copy of its partition in fp32 training too (stage_1_and_2.py:530).
    """
    states = optimizer_states(options)
    states = _ADAM_STATES if states is None else states
    has_master = options.stage > 0 or options.mixed_precision
    master = master_copy_width(options, width) if has_master else 0
    return master + states * (2 if options.low_precision_states else 4)


def _swap_bytes(options: DsOptions, sizes: PartitionSizes) -> int:
    """Return the bytes in CPU memory through which ZeRO-3 swaps to NVMe, and what stays there.

    The optimizer has buffers of its largest sub-group (swap_tensor/optimizer_utils.py). Parameters
    have buffers of a configured size (swap_tensor/partitioned_param_swapper.py). `max_in_cpu`
    trained ones also stay in CPU memory; if there are more, one more buffer has a sub-group of
    them (stage3.py:1018).
    """
    swapped = 0
    if options.offload_optimizer == "nvme":
        master = master_copy_width(options, sizes.width)
        swapped = options.offload_optimizer_buffers * sizes.largest_sub_group * master
    if options.offload_param == "nvme":
        elements = options.offload_param_buffers * options.offload_param_buffer_size
        elements += min(sizes.part, options.offload_param_max_in_cpu)
        if sizes.part > options.offload_param_max_in_cpu:
            elements += sizes.largest_sub_group
        swapped += elements * sizes.width
    return swapped


def _gather_buffer_bytes(model: ModelShape, options: DsOptions, partition: ModelPartition) -> int:
    """Return the bytes of the buffer of an all-gather, from which parameters are copied.

    Several parameters share one buffer (partition_parameters.py:1343, 795), at most the prefetch
    bucket and one more parameter. A single parameter is gathered in place.
    """
    if not options.prefetch_bucket_size or options.allgather_sequential:
        return 0
    if partition.part == partition.whole:  # a single rank gathers nothing
        return 0
    largest = max((parameter.numel for parameter in model.parameters), default=0)
    most = (options.prefetch_bucket_size + largest) * _widest(model.parameters, options)
    return min(partition.gathered_bytes, most)


def _persistent_bytes(model: ModelShape, options: DsOptions) -> int:
    """Return the bytes that ZeRO-3 keeps gathered between steps (parameter_offload.py)."""
    if options.stage != 3:
        return 0
    small = [p for p in model.parameters if p.numel <= options.param_persistence_threshold]
    most = options.model_persistence_threshold * _widest(small, options)
    return min(sum(p.numel * p.width_in_training(options.model_dtype) for p in small), most)
