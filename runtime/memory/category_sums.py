"""What a step's peak was made of, from what the engine held before and after its update."""

from __future__ import annotations

from collections.abc import Mapping

from .categories import (
    ACTIVATIONS,
    COMM_BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    Held,
)

# Which of them may not have been there in full at the moment of the peak, likeliest first.
_PARTLY_THERE = (OTHER, COMM_BUFFERS, GRADIENTS)


def categories_at_peak(
    before_step: Mapping[str, int],
    after_step: Mapping[str, int],
    floor_bytes: float,
    peak_bytes: float,
    baseline_bytes: float,
) -> dict[str, float]:
    """Return the bytes of every category at the peak of forward and backward, on one device.

    They add up to peak - baseline, and none is below 0:

    - parameters are those after the step; so is the optimizer, but for the step that creates its
      states, which are not there yet at the peak
    - gradients and comm_buffers are the larger of the two moments, for they come and go
    - other = floor - baseline - all that the engine held after the step
    - activations are what is left, and include whatever lives only within a pass

    Where the others are more than peak - baseline, not all of them were there at the peak: other,
    comm_buffers and gradients are cut, in this order. Parameters and optimizer never are.

    Args:
        before_step: Bytes by category as the update begins, gradients there; may be empty.
        after_step: Bytes by category when it has ended.
        floor_bytes: In use when the step has ended; on CPU RSS less what the C library's heap has
            free (`free_heap.py`), as the next pass is served from that.
        peak_bytes: Most in use during its forward and backward.
        baseline_bytes: In use for anything but training, see `baseline`.
    """
    before_step = before_step or after_step
    held = float(sum(after_step.values()))
    optimizer = min(before_step.get(OPTIMIZER, 0), after_step.get(OPTIMIZER, 0))
    bytes_of = {
        PARAMETERS: float(after_step.get(PARAMETERS, 0)),
        GRADIENTS: _larger(before_step, after_step, GRADIENTS),
        OPTIMIZER: float(optimizer),
        COMM_BUFFERS: _larger(before_step, after_step, COMM_BUFFERS),
        OTHER: max(0.0, floor_bytes - baseline_bytes - held),
    }
    left = peak_bytes - baseline_bytes - sum(bytes_of.values())
    return {**_cut(bytes_of, -left), ACTIVATIONS: max(0.0, left)}


def _cut(bytes_of: Mapping[str, float], excess: float) -> dict[str, float]:
    """Take off what is too much, as far as there is something to take it from."""
    cut = dict(bytes_of)
    for category in _PARTLY_THERE:
        if excess > 0:
            less = min(excess, cut[category])
            cut[category] -= less
            excess -= less
    return cut


def baseline(device: str, in_use_bytes: float, held: Mapping[str, int]) -> float:
    """Return how much of a device's memory in use is no matter of training, in bytes.

    On the host: interpreter, libraries and what the script holds beside the engine, as they are
    when the watch opens. Of a GPU only the allocator's figure is looked at, which has no such part.

    Args:
        device: "cpu" or "cuda:0".
        in_use_bytes: RSS at that moment, less what the C library's heap has free.
        held: The engine's bytes by category on that device at that moment.
    """
    return max(0.0, in_use_bytes - sum(held.values())) if device == "cpu" else 0.0


def larger_of(one: Held, other: Held) -> dict[str, dict[str, int]]:
    """Return by device and category the larger of two looks at an engine.

    Under ZeRO-1 and 2 the reduction buckets are there until the backward pass ends and no longer: a
    look taken as `_backward_epilogue` begins has them, one taken before the update has not.
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


def _larger(before_step: Mapping[str, int], after_step: Mapping[str, int], name: str) -> float:
    return float(max(before_step.get(name, 0), after_step.get(name, 0)))
