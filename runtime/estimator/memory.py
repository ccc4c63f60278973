"""What a rank holds in memory in training, by category, on the device and on the host.

Source: section 5 of the ZeRO paper (arXiv 1910.02054): with P parameters over n ranks, 16-bit
training by Adam holds 2P of parameters, 2P of gradients and 12P of optimizer (fp32 copy, momentum,
variance); stage 1 divides the last by n, stage 2 the gradients too, stage 3 all. Where DeepSpeed
0.19.8 holds something else, the line that does so is named. Gradients are planned in gradients.py,
activations in activations.py; peak.py puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .gradients import Sizes, gradient_bytes, master_width
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


# What backward fills and the step then needs no more, or in another form.
_OF_BACKWARD = ("gathered", "gradients", "comm_buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank, without activations.

    Attributes:
        device_bytes: At the end of backward, by category: parameters, gathered (the most that
            ZeRO-3 has whole at any time, with what a gather lands in), gradients, optimizer,
            comm_buffers (buckets of gradients, messages, temporary copies).
        step_bytes: What the optimizer's step has on the device beside parameters and optimizer:
            gradients and their copies.
        forward_bytes: What is there of gradients and buffers while forward runs.
        resting_bytes: All that is on the device between steps.
        host_bytes: What offloading keeps in CPU memory.
        nvme_bytes: What offloading keeps on disk.
        accumulated_device_bytes: What is more on the device at the end of backward where a step
            has several micro-batches.
        accumulated_forward_bytes: What is more while forward runs, from the second one on.
        accumulated_host_bytes: What is more in CPU memory.
    """

    device_bytes: Mapping[str, int]
    step_bytes: int
    forward_bytes: int
    resting_bytes: int
    host_bytes: int
    nvme_bytes: int
    accumulated_device_bytes: int = 0
    accumulated_forward_bytes: int = 0
    accumulated_host_bytes: int = 0

    @property
    def backward_bytes(self) -> int:
        """What backward has on the device at its end beside parameters and optimizer."""
        return sum(self.device_bytes[category] for category in _OF_BACKWARD)

    @property
    def kept_bytes(self) -> int:
        """What the device holds at all times."""
        return sum(self.device_bytes.values()) - self.backward_bytes


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
    sizes = Sizes(part=partition.part, whole=partition.whole, width=width)
    gradients = gradient_bytes(model, options, sizes)
    landing = _landing(model, options, partition) * width
    offload, offload_param = options.offload_optimizer, options.offload_param
    moved = round(optimizer * options.offload_optimizer_ratio) if offload != "none" else 0
    kept_away = kept * width if offload_param != "none" else 0
    parameters, optimizer_left = kept * width - kept_away, optimizer - moved
    whole = _persistent(model, options) * width
    return MemoryPlan(
        device_bytes={
            "parameters": parameters,
            "gathered": partition.gathered * width + landing,
            "gradients": gradients.kept,
            "optimizer": optimizer_left,
            # Gathering and reducing do not fill up at the same moment.
            "comm_buffers": gradients.buffers + max(0, gradients.transient - landing),
        },
        step_bytes=gradients.in_step,  # which first lets go of what is whole (stage3.py, step)
        forward_bytes=gradients.in_forward,
        resting_bytes=parameters + optimizer_left + gradients.in_forward + whole,
        host_bytes=gradients.host
        + moved * (offload == "cpu")
        + kept_away * (offload_param == "cpu"),
        nvme_bytes=moved * (offload == "nvme") + kept_away * (offload_param == "nvme"),
        accumulated_device_bytes=gradients.accumulated,
        accumulated_forward_bytes=gradients.accumulated_in_forward,
        accumulated_host_bytes=gradients.host_accumulated,
    )


def _optimizer(options: Options, partition: Partition, width: int) -> int:
    """Return the bytes of the master copy and the optimizer's states.

    ZeRO keeps a flat copy for its partition in fp32 training too (stage_1_and_2.py:530).
    """
    states = optimizer_states(options)
    states = _ADAMS_STATES if states is None else states
    has_master = options.stage > 0 or options.mixed_precision
    master = master_width(options, width) if has_master else 0
    state_width = 2 if options.low_precision_states else 4
    return partition.part * (master + states * state_width)


def _landing(model: ModelShape, options: Options, partition: Partition) -> int:
    """Return the elements of the buffer of a gather, out of which parameters are then copied.

    A gather of several is one buffer (partition_parameters.py:1343, 795), at most of the prefetch
    bucket and one more parameter; a lone parameter is gathered into its own place.
    """
    if not options.prefetch_bucket_size or options.allgather_sequential:
        return 0
    if partition.part == partition.whole:  # a lone rank gathers nothing
        return 0
    largest = max((parameter.numel for parameter in model.parameters), default=0)
    return min(partition.gathered, options.prefetch_bucket_size + largest)


def _persistent(model: ModelShape, options: Options) -> int:
    """Return the elements that ZeRO-3 keeps whole between steps (parameter_offload.py)."""
    small = [p.numel for p in model.parameters if p.numel <= options.param_persistence_threshold]
    return min(sum(small), options.model_persistence_threshold) if options.stage == 3 else 0
