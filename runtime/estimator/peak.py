"""The most that a rank holds at any time of a step, activations included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .activations import Activations
from .memory import MemoryPlan

Moment = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes at the fullest moment: as forward or backward ends, or in the optimizer's step."""

    device_bytes: int
    host_bytes: int
    moment: Moment


def peak_of(memory: MemoryPlan, *, micro_batches: int = 1, activation_bytes: int = 0) -> Peak:
    """Return the peak of a step.

    Backward frees activations as it fills gradients, so that the fuller of its ends counts.

    Args:
        memory: What the rank holds without activations.
        micro_batches: Of one step on one rank.
        activation_bytes: Of one micro-batch, at their fullest.
    """
    several = micro_batches > 1
    gathered = memory.device_bytes["gathered"]
    forward = gathered + memory.forward_bytes + several * memory.accumulated_forward_bytes
    moments: dict[Moment, int] = {
        "forward": forward + activation_bytes,
        "backward": memory.backward_bytes + several * memory.accumulated_device_bytes,
        "step": memory.step_bytes,
    }
    moment = max(moments, key=lambda name: moments[name])
    return Peak(
        device_bytes=memory.kept_bytes + moments[moment],
        host_bytes=memory.host_bytes + several * memory.accumulated_host_bytes,
        moment=moment,
    )


def largest_micro_batch(
    memory: MemoryPlan, activations: Activations, limit_bytes: int, *, micro_batches: int = 1
) -> int:
    """Return the samples of the largest micro-batch that fits on the device; 0 if none does."""

    def fits(samples: int) -> bool:
        needed = activations.bytes_of(samples)
        peak = peak_of(memory, micro_batches=micro_batches, activation_bytes=needed)
        return peak.device_bytes <= limit_bytes

    if not fits(1):
        return 0
    room = limit_bytes // max(1, activations.sample_bytes)
    fitting, too_many = 1, room + 2
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting
