"""Recording rules: ratios and sums over ranks that panels and alerts use.

Dashboards and alerts use a rule by its constant. To add one: a constant in the file of its
subject, and an entry in the file's RULES. Sums are divided, never ratios averaged. "5m" and "30m"
in a name are the shipped ranges. A level names the labels that remain besides job: `run_rank`
keeps run and rank.
"""

from __future__ import annotations

from . import communication, devices, memory, overhead, training, window
from .rule import RecordingRule

GROUPS: dict[str, tuple[RecordingRule, ...]] = {
    "zerowatch-communication": communication.RULES,
    "zerowatch-training": training.RULES,
    "zerowatch-memory": memory.RULES,
    "zerowatch-window": window.RULES,
    "zerowatch-devices": devices.RULES,
    "zerowatch-overhead": overhead.RULES,
}
