"""When something is a symptom, as the settings have it."""

from __future__ import annotations

from ...metrics.settings import Settings
from .policy.diagnose import Thresholds


def thresholds_of(settings: Settings) -> Thresholds:
    """Return when something is a symptom, as the user sees it."""
    return Thresholds(
        comm_ratio_high=settings.tuner.comm_ratio_high,
        device_utilization_low=settings.tuner.device_utilization_low,
    )
