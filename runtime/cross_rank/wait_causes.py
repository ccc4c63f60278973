"""Why a collective held training up. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WaitCauses:
    """Exposed seconds by root cause; they add up to what was exposed."""

    imbalance: float = 0.0
    latency: float = 0.0
    redundancy: float = 0.0
    bandwidth: float = 0.0

    def add(
        self,
        *,
        exposed: float,
        duration: float,
        wait: float,
        base_latency: float,
        volume_ratio: float | None,
        moves_data: bool = True,
    ) -> None:
        """Split one collective's exposed time.

        Training was held up for `exposed` seconds by a collective that took `duration`, of which
        it spent `wait` waiting for a later rank. The part that waiting cannot explain is transfer:
        first the base latency; of the rest a share of 1 - 1/V was data that a perfect pattern
        would not have sent, where V is the volume ratio; what is left is bandwidth. Where no data
        move, as in a barrier, all of the transfer is latency, be it more than the base one.
        """
        transfer = min(exposed, duration - wait)
        latency = min(transfer, base_latency) if moves_data else transfer
        excess = 0.0 if volume_ratio is None or volume_ratio <= 1 else 1 - 1 / volume_ratio
        redundancy = (transfer - latency) * excess
        self.imbalance += exposed - transfer
        self.latency += latency
        self.redundancy += redundancy
        self.bandwidth += transfer - latency - redundancy
