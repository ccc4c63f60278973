"""The ways in: deepspeed.initialize with a watch, and a watch for an engine that exists.

What a process has one of stands here: its tap on the collectives, and the watch on its run.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..metrics.settings import Settings, load_settings
from .collectives.instrument import CollectiveInstrumentation
from .common.ds_config import read_zerowatch_block
from .common.ds_config_errors import ConfigErrors, warn_of_misspelt_keys
from .common.fail_open import FailOpen
from .monitor.console_logging import show_own_lines
from .monitor.null_watch import NullWatch

if TYPE_CHECKING:
    from .monitor.watch import Watch


@dataclass(slots=True)
class _Process:
    """What this process has one of."""

    fail_open: FailOpen = field(default_factory=FailOpen)
    collectives: CollectiveInstrumentation | None = None
    watch: Watch | None = None
    num_watches: int = 0

    def open_collectives(self) -> CollectiveInstrumentation:
        if self.collectives is None:
            self.collectives = CollectiveInstrumentation(self.fail_open)
            atexit.register(_close_at_exit)
        self.collectives.open()
        return self.collectives


_process = _Process()

# What an engine that does not train has for an optimizer.
_NO_OPTIMIZERS = ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")
# How long the process waits at its end for collectives that nobody waited for; the backend waits
# for them in any case.
COMPLETION_SECONDS = 60.0


def initialize(*args: Any, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Call deepspeed.initialize and watch the engine.

    Takes the arguments of `deepspeed.initialize`, and returns its tuple: engine, optimizer,
    training_dataloader, lr_scheduler. The engine is DeepSpeed's own; `engine.watch` is the watch,
    and `engine.watch.close()` takes it off again. Of several engines the first with an optimizer
    is the watched run, and the others share its watch.

    Args:
        args: As for `deepspeed.initialize`.
        settings: Settings nested as in zerowatch.toml, such as {"serve": {"port": 9500}}.
        kwargs: As for `deepspeed.initialize`.

    Raises:
        SettingsError: A setting is wrong.
        DsConfigError: DeepSpeed refuses its configuration; its own error is the cause.
    """
    original = _original()
    config = _config_given(original, args, kwargs)
    loaded = load_settings(settings, read_zerowatch_block(config))
    if loaded.enabled:
        _process.open_collectives()
    _process.fail_open.wrap("ds config", warn_of_misspelt_keys)(config)
    with ConfigErrors(config, _process.fail_open, raise_ours=True):
        result = original(*args, **kwargs)
    engine = result[0]
    _process.fail_open.wrap("watch", _maybe_watch)(engine, loaded)
    engine.watch = _process.watch or NullWatch()
    return result


def initialize_unwatched(**kwargs: Any) -> Any:
    """Call deepspeed.initialize for an engine that an open watch will move to.

    Raises:
        DsConfigError: DeepSpeed refuses its configuration.
    """
    with ConfigErrors(kwargs["config"], _process.fail_open, raise_ours=True):
        return _original()(**kwargs)


def watch(engine: Any, settings: Mapping[str, Any] | None = None) -> Watch:
    """Watch an engine that exists. A watch on another engine is closed first.

    Args:
        engine: A DeepSpeed engine. If it is watched already, that watch is returned as it is.
        settings: Settings nested as in zerowatch.toml.

    Raises:
        SettingsError: A setting is wrong.
        TypeError: This is no engine.
    """
    if not hasattr(engine, "global_steps"):
        raise TypeError(
            f"zerowatch.watch takes a DeepSpeed engine, got {type(engine).__name__}; "
            "pass what deepspeed.initialize returned first"
        )
    running = _process.watch
    if running is not None and running.is_open and running.watches(engine):
        return running
    block = engine.config if isinstance(engine.config, Mapping) else {}
    opened = _open_watch(engine, load_settings(settings, read_zerowatch_block(block)))
    engine.watch = opened
    return opened


def instrument_torch() -> None:
    """Install the tap right after torch was imported, before a process group exists."""
    if load_settings(ds_block={"enabled": True}).enabled:
        _process.open_collectives()


def wrap_deepspeed(deepspeed: ModuleType) -> None:
    """Replace deepspeed.initialize, right after its import, by one that also watches."""
    original = deepspeed.initialize

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        config = _config_given(original, args, kwargs)
        show_own_lines()
        settings = load_settings(ds_block=read_zerowatch_block(config))
        _process.fail_open.wrap("ds config", warn_of_misspelt_keys)(config)
        with ConfigErrors(config, _process.fail_open):
            result = original(*args, **kwargs)
        _process.fail_open.wrap("watch", _maybe_watch)(result[0], settings)
        return result

    watched.zerowatch_original = original  # type: ignore[attr-defined]
    deepspeed.initialize = watched  # type: ignore[attr-defined]


def close_watch(*, failed: bool) -> None:
    """Close this process's watch for good, and wait for the last scrape where one is due.

    Args:
        failed: Whether the run ends by an exception or a signal; then nobody waits.
    """
    if _process.watch is not None:
        _process.watch.close(failed=failed, at_exit=True)
    if _process.collectives is not None:
        _process.collectives.close()
        _process.collectives.call_recorder.wait_for_completion(COMPLETION_SECONDS)


def _original() -> Callable[..., Any]:
    """Return deepspeed.initialize. Only ours is looked through: others wrap for their own ends."""
    import deepspeed

    found: Callable[..., Any] = deepspeed.initialize
    return getattr(found, "zerowatch_original", found)


def _maybe_watch(engine: Any, settings: Settings) -> None:
    if settings.enabled:
        _watch_first(engine, settings)
    elif _process.collectives is not None:
        _process.collectives.close()


def _watch_first(engine: Any, settings: Settings) -> None:
    """Watch the first engine that trains; in a notebook, the one that was made last."""
    # By name: DeepSpeed must not be imported here, before the script does.
    trains = type(engine.optimizer).__name__ not in _NO_OPTIMIZERS
    running = _process.watch is not None and _process.watch.is_open
    if trains and (not running or _is_interactive()):
        _open_watch(engine, settings)


def _open_watch(engine: Any, settings: Settings) -> Watch:
    from .monitor.watch import Watch

    show_own_lines()
    if _process.watch is not None:
        _process.watch.close()
    collectives = _process.open_collectives()
    _process.watch = Watch(engine, collectives, _process.fail_open, settings, _process.num_watches)
    _process.num_watches += 1
    if _process.num_watches == 1:
        os.register_at_fork(after_in_child=_abandon)
    return _process.watch


def _close_at_exit() -> None:
    # The interpreter leaves an uncaught exception there before it runs exit handlers.
    close_watch(failed=hasattr(sys, "last_value"))


def _abandon() -> None:
    """Let go of everything in a forked child, which else keeps the port of a dead parent."""
    if _process.watch is not None:
        _process.watch.close_after_fork()
    if _process.collectives is not None:
        _process.collectives.close()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _config_given(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Find the ds config among deepspeed.initialize's arguments, as DeepSpeed does."""
    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    except TypeError:  # DeepSpeed will complain of them
        return None
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    return getattr(given.get("args"), "deepspeed_config", None)
