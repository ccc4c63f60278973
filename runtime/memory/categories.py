"""Divides a step's memory peak into categories."""

from __future__ import annotations

from collections.abc import Mapping

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
COMM_BUFFERS = "comm_buffers"
ACTIVATIONS = "activations"
OTHER = "other"

# Categories of tensors that the engine holds. The bytes of the other categories are remainders.
ENGINE_CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, COMM_BUFFERS)
# Bytes of the ENGINE_CATEGORIES, by device and category.
EngineBytes = Mapping[str, Mapping[str, int]]
# Categories that may be incomplete at the peak, most likely first.
_REDUCIBLE = (OTHER, COMM_BUFFERS, GRADIENTS)


def categories_at_peak(
    before_step: Mapping[str, int],
    after_step: Mapping[str, int],
    between_steps_bytes: float,
    peak_bytes: float,
    baseline_bytes: float,
) -> dict[str, float]:
    """Return the bytes of every category at the peak of forward and backward, on one device.

    The categories add up to peak - baseline, and no category is below 0:

    - parameters: bytes after the optimizer step.
    - optimizer: bytes after the optimizer step. The step that creates the optimizer states is an
      exception, because these states do not exist yet at the peak.
    - gradients and comm_buffers: the larger of the bytes before and after the optimizer step,
      because these tensors are temporary.
    - other: bytes between steps - baseline - all bytes that the engine holds after the step.
    - activations: the remainder. It includes all memory that exists only within a pass.

    If the categories besides activations exceed peak - baseline, some of their memory did not exist
    at the peak. In this case other, comm_buffers and gradients are reduced, in this order.
    Parameters and optimizer are never reduced.

    Args:
        before_step: Bytes by category before the optimizer step, when gradients exist. May be
            empty.
        after_step: Bytes by category after the optimizer step.
        between_steps_bytes: Bytes in use after the step. On CPU, minus the free heap of the C
            library (`free_heap_bytes`), because the next pass allocates from this heap.
        peak_bytes: Peak during forward and backward.
        baseline_bytes: Bytes in use for other purposes than training, see `baseline`.
    """
    before_step = before_step or after_step
    held = float(sum(after_step.values()))
    optimizer = min(before_step.get(OPTIMIZER, 0), after_step.get(OPTIMIZER, 0))
    bytes_of = {
        PARAMETERS: float(after_step.get(PARAMETERS, 0)),
        GRADIENTS: _larger(before_step, after_step, GRADIENTS),
        OPTIMIZER: float(optimizer),
        COMM_BUFFERS: _larger(before_step, after_step, COMM_BUFFERS),
        OTHER: max(0.0, between_steps_bytes - baseline_bytes - held),
    }
    remainder = peak_bytes - baseline_bytes - sum(bytes_of.values())
    return {**_reduce(bytes_of, -remainder), ACTIVATIONS: max(0.0, remainder)}


def baseline(device: str, in_use_bytes: float, held: Mapping[str, int]) -> float:
    """Return the bytes in use on a device that do not belong to training.

    On the host, this is the memory of the interpreter, of libraries, and of objects that the script
    holds besides the engine when the watch starts. On a GPU, the baseline is 0, because only the
    allocator's own count is read.

    Args:
        device: "cpu" or "cuda:0".
        in_use_bytes: Bytes in use when the watch starts. On CPU, minus the C library's free heap.
        held: Bytes that the engine holds on this device at the same time, by category.
    """
    return max(0.0, in_use_bytes - sum(held.values())) if device == "cpu" else 0.0


def elementwise_max(one: EngineBytes, other: EngineBytes) -> dict[str, dict[str, int]]:
    """Return the larger bytes of two samples of an engine, for each device and category.

    Under ZeRO-1 and 2 the reduction buckets exist only until the backward pass ends. A sample that
    is taken when `_backward_epilogue` begins contains them, and a sample that is taken before the
    optimizer step does not.
    """
    return {
        device: {
            category: max(one.get(device, {}).get(category, 0), other[device].get(category, 0))
            for category in other[device]
        }
        if device in other
        else dict(one[device])
        for device in {**one, **other}
    }


def _reduce(bytes_of: Mapping[str, float], excess: float) -> dict[str, float]:
    """Subtract the excess from the reducible categories, but not below 0."""
    reduced = dict(bytes_of)
    for category in _REDUCIBLE:
        if excess > 0:
            less = min(excess, reduced[category])
            reduced[category] -= less
            excess -= less
    return reduced


def _larger(before_step: Mapping[str, int], after_step: Mapping[str, int], name: str) -> float:
    return float(max(before_step.get(name, 0), after_step.get(name, 0)))
