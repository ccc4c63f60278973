"""Divides a step's memory peak into categories."""

from __future__ import annotations

from collections.abc import Mapping

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
COMM_BUFFERS = "comm_buffers"
ACTIVATIONS = "activations"
OTHER = "other"

# Categories of tensors that the engine holds; the others are computed as remainders.
ENGINE_CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, COMM_BUFFERS)
# Bytes of these categories, by device and category.
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

    They add up to peak - baseline, and none is below 0:

    - parameters: those after the step. optimizer: the same, except in the step that creates its
      states, which do not exist yet at the peak
    - gradients and comm_buffers: the larger of the two moments, as they are temporary
    - other = bytes between steps - baseline - everything that the engine holds after the step
    - activations: the remainder, including all that lives only within a pass

    If the others exceed peak - baseline, some of them did not exist at the peak: other,
    comm_buffers and gradients are reduced, in this order. Parameters and optimizer never are.

    Args:
        before_step: Bytes by category before the optimizer step, with gradients; may be empty.
        after_step: Bytes by category after it.
        between_steps_bytes: Bytes in use after the step. On CPU, RSS minus the free heap of the C
            library (`free_heap_bytes`), as the next pass allocates from that.
        peak_bytes: Peak during forward and backward.
        baseline_bytes: Bytes in use for anything but training, see `baseline`.
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

    On the host: interpreter, libraries, and what the script holds besides the engine when the
    watch starts. On a GPU: 0, as only the allocator's own count is read.

    Args:
        device: "cpu" or "cuda:0".
        in_use_bytes: RSS at that moment, minus the free heap of the C library.
        held: Bytes of the engine by category on that device at that moment.
    """
    return max(0.0, in_use_bytes - sum(held.values())) if device == "cpu" else 0.0


def elementwise_max(one: EngineBytes, other: EngineBytes) -> dict[str, dict[str, int]]:
    """Return the larger bytes of two samples of an engine, for each device and category.

    Under ZeRO-1 and 2 the reduction buckets exist only until the backward pass ends: a sample taken
    as `_backward_epilogue` begins has them, one taken before the optimizer step does not.
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
    """Subtract the excess from the reducible categories, as far as they suffice."""
    reduced = dict(bytes_of)
    for category in _REDUCIBLE:
        if excess > 0:
            less = min(excess, reduced[category])
            reduced[category] -= less
            excess -= less
    return reduced


def _larger(before_step: Mapping[str, int], after_step: Mapping[str, int], name: str) -> float:
    return float(max(before_step.get(name, 0), after_step.get(name, 0)))
