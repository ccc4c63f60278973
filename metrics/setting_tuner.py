"""The settings of the auto-tuner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from .setting_section import Section
from .thresholds import COMM_RATIO_HIGH, DEVICE_UTILIZATION_LOW


class TunerSettings(Section):
    """What the tuner may do, how sure it must be, and what it may cost."""

    mode: Literal["off", "advise", "auto"] = "advise"
    """`off`: no tuner. `advise` says what to change and changes nothing. `auto` changes it, where
    the training is a TrainingRun (elsewhere it advises), and takes back what did not help."""
    numerics: Literal["bitwise", "reassociation", "statistical", "unrestricted"] = "reassociation"
    """What a change may do to the numbers: `bitwise` nothing; `reassociation` sum them in another
    order; `statistical` also round them otherwise, the same on average; `unrestricted` also
    change batch size and learning rate."""
    rebuild: bool = True
    """Whether the engine may be rebuilt for what cannot be changed in it."""
    min_gain: float = Field(default=0.01, gt=0, lt=1)
    """Least gain of throughput that is worth a change; 0.01 is 1 %. Never below 1 %, for a rebuild
    3 %."""
    exploration_ratio: float = Field(default=0.05, ge=0, le=1)
    """Most of the training time that may be lost to trials, as a share of the time so far plus 10
    minutes; 0 for no trials at all."""
    observe_seconds: float = Field(default=20.0, gt=0)
    """Seconds of training that a diagnosis of a TrainingRun is made from; 30 for any other."""
    soak_steps: int = Field(default=200, ge=0)
    """Most steps after an accepted change in which nothing else is tried; 10 seconds of training,
    and at least 5 steps, if that is less."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps that the training will have; a change that cannot pay for its trial by then is not
    tried. Without it, the run is taken to go on for long."""
    comm_ratio_high: float = Field(default=COMM_RATIO_HIGH, gt=0, lt=1)
    """Share of training time that waits for communication, above which it is a symptom."""
    device_utilization_low: float = Field(default=DEVICE_UTILIZATION_LOW, gt=0, le=1)
    """A device's busy share below which it is a symptom."""
    stop_file: Path | None = None
    """While this file exists on rank 0's host, nothing is changed and what is on trial is taken
    back; what was kept stays. By default `tuner.stop` in the run folder."""
    history_dir: Path | None = None
    """Directory of the tuner's history, reused by later runs of the same job; by default `.tuner`
    in run_log.folder, and none if no run log is written. Delete it to reset."""
