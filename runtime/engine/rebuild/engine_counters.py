"""What an engine counts and steers beside its tensors: steps, learning rates, loss scales."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
# A dynamic loss scale lives in two classes, which have most of these in common.
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OVERRIDES = ("custom_loss_scaler", "external_loss_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Counters of an engine, and the states of its LR scheduler and loss scalers."""

    counters: Mapping[str, int]
    scheduler: Mapping[str, Any] | None
    scale: Mapping[str, Any]
    overrides: Mapping[str, Any]
    autocast_scale: Mapping[str, Any] | None


def take_account(engine: Any) -> EngineCounters:
    """Copy an engine's account."""
    scheduler, scaler = engine.lr_scheduler, _autocast_scaler(engine)
    return EngineCounters(
        counters={name: getattr(engine, name) for name in _COUNTERS},
        scheduler=None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        scale=_present(_scale_keeper(engine.optimizer), _SCALE),
        overrides=_present(engine.optimizer, _OVERRIDES),
        autocast_scale=None if scaler is None else copy.deepcopy(scaler.state_dict()),
    )


def give_account(account: EngineCounters, engine: Any) -> None:
    """Let an engine go on counting from an account."""
    for name, value in account.counters.items():
        setattr(engine, name, value)
    if account.scheduler is not None and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(copy.deepcopy(dict(account.scheduler)))
    _put(_scale_keeper(engine.optimizer), account.scale)
    _put(engine.optimizer, account.overrides)
    scaler = _autocast_scaler(engine)
    if account.autocast_scale is not None and scaler is not None:
        scaler.load_state_dict(dict(account.autocast_scale))


def _scale_keeper(optimizer: Any) -> Any:
    """Return what holds the loss scale of fp16; None where nothing is scaled."""
    keeper = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))
    dynamic = getattr(keeper, "dynamic", getattr(keeper, "dynamic_loss_scale", False))
    return keeper if dynamic else None


def _autocast_scaler(engine: Any) -> Any:
    own = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return own or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _present(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _put(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)
