"""Implements the entry points `initialize` and `watch`, and holds their state in this process.

A process has one instrumentation of its collectives and one watch on its run. DeepSpeed is imported
inside functions only, so that a script can be attached to before it imports DeepSpeed.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import gc
import inspect
import logging
import math
import multiprocessing
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..metrics.settings import Settings, load_settings
from .collectives.instrument import CollectiveInstrumentation
from .common.ds_config import read_zerowatch_block
from .common.ds_config_errors import ConfigErrors, warn_of_misspelled_keys
from .common.fail_open import FailOpen
from .common.interrupts import ended_by_next_interrupt, is_error_exit, is_interrupt
from .common.outer_error import OuterError
from .common.process_info import launcher_run_id, numbered_run_id, this_process
from .monitor.console_logging import show_own_lines
from .monitor.startup_monitor import StartupMonitor
from .monitor.watch import NullWatch, Watch, WatchHandle

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from .common.optimizer_steps import StepCallbackHandle

logger = logging.getLogger(__name__)

# How long a process waits at exit for collectives that the script never waited for. The backend
# waits for these collectives in any case.
COMPLETION_SECONDS = 60.0
# DeepSpeed's default of `distributed_port`.
DISTRIBUTED_PORT = 29500
# The classes of `engine.optimizer` on an engine that does not train.
_NO_OPTIMIZERS = ("NoneType", "DummyOptim", "DeepSpeedZeRoOffload")
# So many optimizers without a model end the search for it. After so many beside the watched one,
# further ones no longer show that another training has begun.
MAX_PASSED_OVER = 10
# To open a run takes up to a second, within a step. After so many runs of fewer steps than these
# whose models no longer exist, a model is watched only once it has been trained for so many steps.
# All ranks decide at the same step; their clocks would differ.
MAX_SHORT_RUNS = 3
SHORT_RUN_STEPS = 500
# Hooks that outlive a watch: one that has failed may be missing in all further runs.
_HOOKS_OF_PROCESS = ("collectives", "functional collectives", "streams")


@dataclass(slots=True)
class _PassedOver:
    """An engine that was made while the watched one existed, until its first step.

    Attributes:
        engine: The engine, if it still exists.
        settings: The settings with which it would be watched.
        is_beside: Whether another engine or model has trained since this one was made.
    """

    engine: weakref.ref[Any]
    settings: Settings
    is_beside: bool = False


@dataclass(slots=True)
class _Process:
    """State of this process.

    Attributes:
        settings: The settings with which the watch was asked for.
        module: The model of the engine for which the watch was opened, if it still exists.
        trainings: The number of the last training by the run id that it was given.
        own_ids: The run ids that the watches before the last one have got.
        is_new_training: Whether the next watch is of a new training, even with the same engine.
        is_model_known: Whether optimizer steps no longer show what the script trains.
        closes_at_exit: Whether the exit handler is registered, which a forked child loses.
        finalizer: Closes the watch at the end of a child of multiprocessing.
        outer_error: The error in whose handler the parent has forked this child, if any.
        watches_torch: Whether the watch is of a torch model, without DeepSpeed.
        is_opened_in_step: Whether an optimizer step has shown the model of the watch.
        num_steps: Number of steps of all optimizers.
        known_optimizers: The number of steps from which a step of an optimizer may show a model:
            never for the watched one, those beside it, and those whose parameters no module holds.
        num_passed_over: How many optimizers were not watched, in this training.
        num_short_runs: How many short runs were replaced, because their models no longer existed.
        opened_at: The number of steps at which the watch was opened.
        passed_over: Engines that may take the place of the watched one at their first step.
        passed_over_hook: Calls `_on_step_after_engines` at each step while there are such engines.
    """

    fail_open: FailOpen = field(default_factory=FailOpen)
    collectives: CollectiveInstrumentation | None = None
    watch: Watch | None = None
    settings: Settings | None = None
    module: Callable[[], Any] = lambda: None
    num_watches: int = 0
    trainings: Counter[str] = field(default_factory=Counter)
    own_ids: set[str] = field(default_factory=set)
    is_new_training: bool = False
    is_model_known: bool = False
    watches_torch: bool = False
    is_opened_in_step: bool = False
    num_steps: int = 0
    known_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    num_passed_over: int = 0
    num_short_runs: int = 0
    opened_at: int = 0
    passed_over: list[_PassedOver] = field(default_factory=list)
    passed_over_hook: StepCallbackHandle | None = None
    first_step_hook: StepCallbackHandle | None = None
    attached_settings: Mapping[str, Any] | None = None
    closes_at_exit: bool = False
    finalizer: Finalize | None = None
    outer_error: OuterError = field(default_factory=OuterError)
    startup: StartupMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.startup = StartupMonitor(self.has_stepped, self.forward_only_ns, self.fail_open)

    def has_stepped(self) -> bool:
        """Return whether the watch has seen a step or is closed."""
        watch = self.watch
        return watch is not None and (watch.has_stepped or not watch.is_open)

    def forward_only_ns(self) -> int:
        """Return the time of forward passes without a backward since the last step."""
        return 0 if self.watch is None else self.watch.forward_only_ns

    def open_collectives(self) -> CollectiveInstrumentation:
        if self.collectives is None:
            self.collectives = CollectiveInstrumentation(self.fail_open)
        if not self.closes_at_exit:
            atexit.register(_close_at_exit)
            self.closes_at_exit = True
        is_child = multiprocessing.parent_process() is not None
        if is_child and not (self.finalizer and self.finalizer.still_active()):  # none after a fork
            self.finalizer = Finalize(None, _close_at_end_of_child, exitpriority=0)
            self.outer_error = OuterError()
        self.collectives.open()
        return self.collectives


_process = _Process()


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    distributed_port: int = DISTRIBUTED_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` and watch the engine. Stability: stable.

    The parameters, except `settings`, are those of `deepspeed.initialize` (0.19.8). The engine is
    DeepSpeed's own, with one more attribute: `engine.watch`, a `Watch`. If a script makes several
    engines, the first one with an optimizer is watched; the others share its watch. An engine that
    replaces a watched one, which no longer exists or had the same model, gets a watch of its own:
    in its first step, if the script still refers to the watched one while it makes the engine.
    With ZeRO, DeepSpeed may keep an engine that the script has released. A warning then says so;
    `watch(engine)` monitors the next one.

    Examples:
        >>> engine, optimizer, _, scheduler = zerowatch.initialize(
        ...     model=model,
        ...     model_parameters=model.parameters(),
        ...     config="ds.json",
        ...     settings={"serve": {"port": 9500}},
        ... )
        >>> engine.watch.address
        '127.0.0.1:9500'

    Args:
        args: An object with `local_rank` and `deepspeed_config`; not needed with `config`.
        model: The module to train.
        optimizer: An optimizer, or a function of the parameters that returns an optimizer. By
            default the optimizer of the configuration.
        model_parameters: The parameters to optimize, or parameter groups.
        training_data: A dataset, for which DeepSpeed makes a data loader.
        lr_scheduler: A scheduler, or a function of the optimizer that returns a scheduler.
        distributed_port: Port of rank 0 for torch.distributed.
        mpu: A model parallelism unit, such as Megatron-LM's.
        dist_init_required: Whether to initialize torch.distributed. By default it is initialized if
            that has not been done yet.
        collate_fn: Merges samples of `training_data` into a micro-batch.
        config: The DeepSpeed configuration, as a path or a dict.
        mesh_param: Sizes of the data and sequence parallel dimensions of a device mesh.
        config_params: Older name of `config`.
        settings: Settings nested as in zerowatch.toml, such as {"serve": {"port": 9500}}. They
            override environment variables, the ds config and zerowatch.toml.
        kwargs: Parameters that deepspeed.initialize has in other versions.

    Returns:
        engine, optimizer, training_dataloader, lr_scheduler, as from `deepspeed.initialize`. An
        element is None without an optimizer, dataset or scheduler.

    Raises:
        SettingsError: A setting is wrong.
        DsConfigError: DeepSpeed refuses its configuration; its own error is the cause.
        TypeError: `kwargs` has a parameter that deepspeed.initialize does not have.
    """
    original = _original()
    _check_keywords(original, kwargs)
    parameters = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "distributed_port": None if distributed_port == DISTRIBUTED_PORT else distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
        "config": config,
        "mesh_param": mesh_param,
        "config_params": config_params,
    }
    given = {name: value for name, value in parameters.items() if value is not None} | kwargs
    ds_config = _config_given(original, (), given)
    loaded = load_settings(settings, read_zerowatch_block(ds_config))
    if loaded.enabled:
        _process.open_collectives()
        _process.startup.start(initializing=True)
    _process.fail_open.call("ds config", warn_of_misspelled_keys, ds_config)
    with ConfigErrors(ds_config, _process.fail_open, raise_ours=True):
        result: tuple[Any, Any, Any, Any] = original(**given)
    engine = result[0]
    _process.fail_open.call("watch", _maybe_watch, engine, loaded)
    handle: WatchHandle = _process.watch or NullWatch()
    engine.watch = handle
    return result


def watch(
    engine: Any,
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Watch:
    """Watch an existing DeepSpeed engine, or a torch model and its optimizer. Stability: stable.

    A watch on another engine or model is closed first.

    Examples:
        >>> watch = zerowatch.watch(engine, settings={"run_log": {"enabled": False}})
        >>> watch.snapshot()

        Without DeepSpeed, for one process, DistributedDataParallel or FSDP2:

        >>> model = DistributedDataParallel(model)
        >>> watch = zerowatch.watch(model, torch.optim.AdamW(model.parameters()))

    Args:
        engine: A DeepSpeed engine, or the model that the training loop calls, with all its
            wrappers. If it is watched already, its watch is returned unchanged; other settings are
            then ignored with a warning.
        optimizer: The optimizer of the model; each call of its `step` is a step. Not used with an
            engine.
        settings: Settings nested as in zerowatch.toml. With an engine, they may also be the second
            argument.

    Raises:
        SettingsError: A setting is wrong.
        TypeError: `engine` is not a DeepSpeed engine, and no model with an optimizer.
    """
    if isinstance(optimizer, Mapping):
        optimizer, settings = None, optimizer
    running = _process.watch
    block: Mapping[str, Any] = {}
    if hasattr(engine, "global_steps"):
        block = engine.config if isinstance(engine.config, Mapping) else {}
        watched = engine
    else:
        watched = _torch_engine(engine, optimizer)
    loaded = load_settings(settings, read_zerowatch_block(block))
    if running is not None and running.is_open and running.watches(watched):
        if settings and loaded != _process.settings:
            logger.warning(
                "this is watched already, with other settings, which stay. Call close() on its "
                "watch first, to watch it with the new ones."
            )
        return running
    opened = _open_watch(watched, loaded)
    if watched is engine:
        engine.watch = opened
    return opened


def initialize_unwatched(**kwargs: Any) -> Any:
    """Call deepspeed.initialize without a watch; an open watch can move to the engine later.

    Raises:
        DsConfigError: DeepSpeed refuses its configuration.
    """
    with ConfigErrors(kwargs["config"], _process.fail_open, raise_ours=True):
        return _original()(**kwargs)


def instrument_torch() -> None:
    """Instrument collectives right after torch was imported, before a process group exists.

    The first optimizer step shows whether a script trains without DeepSpeed. Its model is watched
    from then on. After `expect_training`, the next step is such a first step, and so is that of
    another optimizer once the watched model no longer exists. After several short runs, the step
    `SHORT_RUN_STEPS` after the first one of such an optimizer takes its place.
    """
    if not load_settings(ds_block={"enabled": True}).enabled:
        return
    _process.open_collectives()
    from .common.optimizer_steps import call_after_steps

    on_step = _process.fail_open.wrap("watch", _watch_torch_model)
    _process.first_step_hook = call_after_steps(
        lambda optimizer: on_step(optimizer) if _may_show_training(optimizer) else None
    )


def _may_show_training(optimizer: torch.optim.Optimizer) -> bool:
    """Count a step, and return whether it may show a training that is not watched yet."""
    _process.num_steps += 1
    may_be_next = _process.watches_torch and _process.num_passed_over < MAX_PASSED_OVER
    if _process.is_model_known and not may_be_next:
        return False
    return _process.num_steps >= _process.known_optimizers.get(optimizer, 0)


def _watch_torch_model(optimizer: torch.optim.Optimizer) -> None:
    """Watch the model of an optimizer that steps, if no engine or model is watched.

    A watched torch model that no longer exists is replaced by the next one; after several short
    runs, only SHORT_RUN_STEPS later. An optimizer of tensors that no module holds does not count.
    In a notebook the newest model is watched.
    """
    from .common.torch_engine import torch_engine, trained_model

    running, is_next = current_watch(), _process.is_model_known
    if is_next:
        is_new = optimizer not in _process.known_optimizers
        if is_new and _process.num_short_runs >= MAX_SHORT_RUNS:
            _process.known_optimizers[optimizer] = _process.num_steps + SHORT_RUN_STEPS
            return
        _pass_over(optimizer)
        is_wanted = running is not None and _is_engine_gone()
    else:
        is_wanted = running is None or _is_interactive() or _is_engine_gone()
    _process.is_model_known = True
    settings = load_settings(_process.attached_settings)
    if not settings.enabled or not is_wanted:
        return
    model = trained_model(optimizer)
    if model is None:
        if not is_next:
            _on_no_model(optimizer)
        return
    # A DeepSpeed engine may go on after its watch was closed.
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        return
    engine = torch_engine(model, optimizer)
    if running is None or not running.watches(engine):
        if is_next and _process.num_steps - _process.opened_at < SHORT_RUN_STEPS:
            _count_short_run()
        _open_watch(engine, settings)
        _process.is_opened_in_step = True


def _count_short_run() -> None:
    _process.num_short_runs += 1
    if _process.num_short_runs == MAX_SHORT_RUNS:
        logger.warning(
            "%d runs have had fewer than %d steps each, and their models no longer exist: from now "
            "on, another model is watched only after %d steps of its training. Call "
            "zerowatch.watch(model, optimizer) to watch one from its start.",
            MAX_SHORT_RUNS,
            SHORT_RUN_STEPS,
            SHORT_RUN_STEPS,
        )


def _on_no_model(optimizer: torch.optim.Optimizer) -> None:
    """Let a later optimizer show the model, a few times, because each search takes time."""
    _pass_over(optimizer)
    _process.is_model_known = _process.num_passed_over >= MAX_PASSED_OVER
    if _process.is_model_known:
        logger.warning(
            "no torch.nn.Module holds the parameters of the first %d optimizers: nothing is "
            "monitored. Call zerowatch.watch(model, optimizer).",
            MAX_PASSED_OVER,
        )


def _pass_over(optimizer: torch.optim.Optimizer) -> None:
    """Never let this optimizer show a model again in this training."""
    _process.known_optimizers[optimizer] = math.inf
    _process.num_passed_over += 1


def expect_training() -> None:
    """Let the next training have a watch, with or without DeepSpeed, if none is open by then."""
    _process.is_new_training = True
    _process.is_model_known = False
    _forget_optimizers()


def _forget_optimizers() -> None:
    _process.known_optimizers.clear()
    _process.num_passed_over = 0


def wrap_deepspeed(deepspeed: ModuleType) -> None:
    """Replace deepspeed.initialize, right after its import, by a function that also watches."""
    original = deepspeed.initialize
    if load_settings(ds_block={"enabled": True}).enabled:
        _process.startup.start()

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        config = _config_given(original, args, kwargs)
        show_own_lines()
        _process.is_model_known = True
        settings = load_settings(_process.attached_settings, read_zerowatch_block(config))
        if settings.enabled:
            _process.startup.start(initializing=True)
        _process.fail_open.call("ds config", warn_of_misspelled_keys, config)
        with ConfigErrors(config, _process.fail_open):
            result = original(*args, **kwargs)
        _process.fail_open.call("watch", _maybe_watch, result[0], settings)
        return result

    watched.zerowatch_original = original  # type: ignore[attr-defined]
    deepspeed.initialize = watched  # type: ignore[attr-defined]


def attach(settings: Mapping[str, Any] | None = None) -> Callable[[], None]:
    """Watch the engines and models that train from now on, as `zerowatch run` does.

    Args:
        settings: Settings nested as in zerowatch.toml.

    Returns:
        A function that ends this, except under `zerowatch run`. The watch of an engine stays open.

    Raises:
        SettingsError: A setting is wrong.
    """
    import deepspeed

    if not load_settings(settings, {"enabled": True}).enabled:
        return lambda: None
    _process.attached_settings = settings
    expect_training()
    original = deepspeed.initialize
    if hasattr(original, "zerowatch_original"):
        return _forget_settings
    instrument_torch()
    wrap_deepspeed(deepspeed)
    watched = deepspeed.initialize

    def detach() -> None:
        _forget_settings()
        if _process.first_step_hook is not None:
            _process.first_step_hook.remove()
        if deepspeed.initialize is watched:
            deepspeed.initialize = original

    return detach


def current_watch() -> Watch | None:
    """Return the open watch of this process, if there is one."""
    watch = _process.watch
    return watch if watch is not None and watch.is_open else None


def is_opened_in_step() -> bool:
    """Return whether the open watch began in a step, and not before the training of its model."""
    return current_watch() is not None and _process.is_opened_in_step


def _forget_settings() -> None:
    _process.attached_settings = None


def close_watch(*, failed: bool) -> None:
    """Close this process's watch for good, and wait for the last scrape if a scrape is due.

    Args:
        failed: Whether the run ends by an exception. After an exception other than Ctrl-C, the
            process does not wait for a scrape. A second Ctrl-C ends the wait.
    """
    _process.startup.stop()
    if _process.first_step_hook is not None:
        _process.is_model_known = True
        _process.first_step_hook.remove()
    _forget_passed_over()
    error = sys.exception() or _uncaught_error()
    interrupted = failed and is_interrupt(error)
    try:
        with ended_by_next_interrupt() if interrupted else nullcontext():
            if _process.watch is not None:
                _process.watch.close(
                    failed=failed and not interrupted, interrupted=interrupted, at_exit=True
                )
            if _process.collectives is not None:
                _process.collectives.close()
                _process.collectives.call_recorder.wait_for_completion(COMPLETION_SECONDS)
    except KeyboardInterrupt:
        with ended_by_next_interrupt():
            if _process.watch is not None:
                _process.watch.close(interrupted=True, at_exit=True)  # what is still open
        raise


def _original() -> Callable[..., Any]:
    """Return deepspeed.initialize without zerowatch's wrapper; other wrappers stay."""
    import deepspeed

    found: Callable[..., Any] = deepspeed.initialize
    return getattr(found, "zerowatch_original", found)


def _check_keywords(original: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Check that deepspeed.initialize has these parameters.

    Raises:
        TypeError: deepspeed.initialize does not have one of the parameters.
    """
    parameters = inspect.signature(original).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for name in keywords:
        if name not in parameters:
            close = difflib.get_close_matches(name, [*parameters, "settings"], n=1)
            raise TypeError(
                f"zerowatch.initialize: deepspeed.initialize has no parameter {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )


def _maybe_watch(engine: Any, settings: Settings) -> None:
    if settings.enabled:
        _watch_first(engine, settings)
    elif _process.collectives is not None and current_watch() is None:
        _process.collectives.close()


def _watch_first(engine: Any, settings: Settings) -> None:
    """Watch the first engine that trains, or the one in its place; in a notebook, the newest."""
    # Compare names of classes, because the script may not have imported DeepSpeed's classes yet.
    trains = type(engine.optimizer).__name__ not in _NO_OPTIMIZERS
    running = current_watch() is not None
    if not trains and not running:
        _process.startup.expect_no_step()
    if not trains:
        return
    if running and not _is_interactive() and not _is_replaced_by(engine):
        _pass_over_engine(engine, settings)
        return
    with ExitStack() as on_failure:
        on_failure.callback(_process.startup.stop)  # without a watch no first step is seen
        _open_watch(engine, settings)
        on_failure.pop_all()


def _is_replaced_by(engine: Any) -> bool:
    """Return whether a new engine replaces the watched one.

    A framework that repeats a training, such as with smaller batches, makes another engine of the
    same model. It may still refer to the previous engine then. If an engine that was passed over
    exists, and no other has trained since, it comes first.
    """
    if engine.module is _process.module():
        return True
    return _is_engine_gone() and all(
        each.is_beside or each.engine() is None for each in _process.passed_over
    )


def _pass_over_engine(engine: Any, settings: Settings) -> None:
    """Let the engine's first step show whether it replaces the watched engine.

    In `engine, *_ = deepspeed.initialize(...)` within a loop, the variable still has the previous
    engine while the next one is made.
    """
    from .common.optimizer_steps import call_after_steps

    _process.passed_over.append(_PassedOver(weakref.ref(engine), settings))
    if _process.passed_over_hook is None:
        on_step = _process.fail_open.wrap("watch", _on_step_after_engines)
        _process.passed_over_hook = call_after_steps(on_step)


def _on_step_after_engines(optimizer: torch.optim.Optimizer) -> None:
    """Watch an engine that was passed over, if it trains and the watched one is gone.

    Steps of other optimizers show nothing: the watched engine may train before the others do. Of
    engines that were made together, such as the two of a GAN, the first one is watched, even if
    another one trains first.
    """
    running = current_watch()
    stepped = next(
        (each for each in _process.passed_over if _optimizer_of(each.engine()) is optimizer), None
    )
    # This also frees engines to which nothing refers, so it comes before the search.
    is_replaced = running is not None and stepped is not None and _is_engine_gone()
    existing = [
        (engine, each) for each in _process.passed_over if (engine := each.engine()) is not None
    ]
    # A TrainingRun with such a handle goes on without a watch.
    watchable = [one for one in existing if not isinstance(vars(one[0]).get("watch"), NullWatch)]
    candidates = [one for one in watchable if one[1] is stepped or not one[1].is_beside]
    if is_replaced and candidates:
        _forget_passed_over()
        engine, passed_over = candidates[0]
        has_handle = vars(engine).get("watch") is not None
        opened = _open_watch(engine, passed_over.settings)
        if has_handle:
            engine.watch = opened
        return
    _process.passed_over = [each for _, each in existing if each is not stepped]
    for each in _process.passed_over:
        each.is_beside = True
    if running is None or not _process.passed_over:
        _forget_passed_over()
    if running is not None and any(each is stepped for _, each in watchable):
        _report_further_engine(running)


def _optimizer_of(engine: Any) -> Any:
    """Return the optimizer of an engine, below DeepSpeed's wrapper. None without an engine."""
    return getattr(engine, "basic_optimizer", None) or getattr(engine, "optimizer", None)


def _forget_passed_over() -> None:
    """Forget the engines that were passed over."""
    _process.passed_over = []
    hook, _process.passed_over_hook = _process.passed_over_hook, None
    if hook is not None:
        hook.remove()


def _report_further_engine(watch: Watch) -> None:
    if this_process().rank == 0:
        logger.warning(
            "another engine trains, and the one that run %s monitors still exists (with ZeRO, "
            "DeepSpeed may keep one that the script has released): the run counts the "
            "communication and memory of both, and not the steps of the other. To monitor the "
            "other one instead, call zerowatch.watch(engine).",
            watch.run_id,
        )


def _is_engine_gone() -> bool:
    """Return whether the engine of the open watch no longer exists."""
    # Engines are in reference cycles, which each rank would free at another time.
    gc.collect()
    return _process.watch is not None and _process.watch.watches(None)


def _open_watch(engine: Any, settings: Settings) -> Watch:
    from .common.torch_engine import TorchEngine
    from .monitor.build_watch import build_watch

    show_own_lines()
    _process.is_model_known = True
    if _process.watch is not None:
        _process.watch.close()
        for hook in _process.fail_open.failures.keys() - _HOOKS_OF_PROCESS:
            del _process.fail_open.failures[hook]  # it was a failure of the earlier run
    collectives = _process.open_collectives()
    parts = (
        engine,
        collectives,
        _process.fail_open,
        _of_this_training(engine, settings),
        _process.num_watches,
        _close_at_exit_before_trackers,
    )
    _process.watch, _process.settings = _separate_watch(*parts) or build_watch(*parts), settings
    _process.module, _process.is_new_training = weakref.ref(engine.module), False
    _process.watches_torch, _process.is_opened_in_step = isinstance(engine, TorchEngine), False
    _forget_optimizers()
    _forget_passed_over()
    if _process.watches_torch:
        _process.known_optimizers[engine.optimizer] = math.inf
    _process.opened_at = _process.num_steps
    _process.num_watches += 1
    if _process.num_watches == 1:
        os.register_at_fork(after_in_child=_close_after_fork)
    return _process.watch


def _of_this_training(engine: Any, settings: Settings) -> Settings:
    """Return the settings with a number after the run id, if an earlier training had the same id.

    A restarted process makes the same trainings in the same order, so each keeps its run folder.
    The number is larger than that of each earlier training, which another run may have raised: the
    folder of a lower number may be that of an earlier training, or become so at a restart.
    """
    from .monitor.run_folder import MAX_LIVE_RUNS

    run_id = settings.run_id or launcher_run_id()
    if run_id is None:
        return settings
    watch, earlier = _process.watch, _process.settings
    own_id = None if watch is None else watch.run_id
    if own_id is not None:
        _process.own_ids.add(own_id)
    is_same = (
        watch is not None
        and watch.watches(engine)
        and not _process.is_new_training
        and earlier is not None
        and earlier.run_id == settings.run_id
    )
    if is_same and own_id is not None:
        return settings.model_copy(update={"run_id": own_id})
    if not is_same:
        numbers = range(1, MAX_LIVE_RUNS)
        used = (one for one in numbers if numbered_run_id(run_id, one) in _process.own_ids)
        _process.trainings[run_id] = max(_process.trainings[run_id], *used, 0) + 1
    number = _process.trainings[run_id]
    if number < 2:
        return settings
    return settings.model_copy(update={"run_id": numbered_run_id(run_id, number)})


def _separate_watch(
    engine: Any,
    collectives: CollectiveInstrumentation,
    fail_open: FailOpen,
    settings: Settings,
    *rest: Any,
) -> Watch | None:
    """Return a watch whose analysis is in another process, if that is asked for and possible."""
    if not settings.process.separate:
        return None
    from .separate_process.build import build_separate_watch, why_not_separate

    reason = why_not_separate(engine, settings)
    if reason is None:
        parts = (engine, collectives, fail_open, settings, *rest)
        opened = fail_open.call("separate process", build_separate_watch, *parts)
        if opened is not None:
            return opened
        reason = "another process cannot be started"
    logger.warning(
        "process.separate is not used, as %s: this rank is monitored in the training's process",
        reason,
    )
    return None


def _torch_engine(model: Any, optimizer: Any) -> Any:
    """Return the engine of a torch model.

    Raises:
        TypeError: These are not a model and its optimizer.
    """
    # A script without torch has neither.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise TypeError(
            "zerowatch.watch takes a DeepSpeed engine, or a torch model and its optimizer, got "
            f"{type(model).__name__}; pass what deepspeed.initialize returned first"
        )
    kind, given = torch.optim.Optimizer, optimizer
    # Wrappers hold the optimizer whose hooks are called. Accelerate's is of torch's class, too.
    while not (isinstance(optimizer, kind) and hasattr(optimizer, "_optimizer_step_pre_hooks")):
        optimizer = getattr(optimizer, "optimizer", None)
        if not isinstance(optimizer, kind):
            raise TypeError(
                f"zerowatch.watch: the optimizer of a torch model is a torch.optim.Optimizer, got "
                f"{type(given).__name__}; call zerowatch.watch(model, optimizer)"
            )
    from .common.torch_engine import torch_engine, trains

    if not trains(optimizer, model):
        logger.warning(
            "the watched optimizer has no parameter of the watched model, so its steps may train "
            "another model. If the model was made again, make the optimizer again, too."
        )
    return torch_engine(model, optimizer)


def _close_at_exit() -> None:
    watch = _process.watch
    failed = None if watch is None else watch.last_cell_failed
    if failed is None:
        exit_failed = watch is not None and watch.has_exit_failed
        failed = _uncaught_error() is not None or exit_failed
    close_watch(failed=failed)


def _uncaught_error() -> BaseException | None:
    watch = _process.watch
    return getattr(sys, "last_value", None) if watch is None else watch.uncaught_error


def _close_at_end_of_child() -> None:
    """Close at the end of a child of multiprocessing. After a fork it calls no exit handlers."""
    error = _process.outer_error.newer()
    cause = error.__context__ if isinstance(error, SystemExit) and error.code else None
    if cause is None:
        close_watch(failed=is_error_exit(error) or isinstance(error, Exception))
        return
    try:
        raise cause  # torch's start_processes ends a rank that has raised by sys.exit(1)
    except type(cause):
        close_watch(failed=True)


def _close_at_exit_before_trackers() -> None:
    """Let the watch close before the experiment trackers that are open now, at exit.

    Exit handlers run in reverse order, and W&B's ends its run.
    """
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


def _close_after_fork() -> None:
    """Drop all state in a forked child, so that the child does not keep the parent's port.

    At its exit there is nothing to close, unless it opens a watch of its own.
    """
    atexit.unregister(_close_at_exit)
    _process.closes_at_exit, _process.finalizer = False, None
    _forget_passed_over()
    if _process.watch is not None:
        _process.watch.close_after_fork()
    if _process.collectives is not None:
        _process.collectives.close()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _config_given(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Return the ds config from deepspeed.initialize's arguments, as DeepSpeed finds it."""
    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    except TypeError:  # DeepSpeed raises an error for these arguments
        return None
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    return getattr(given.get("args"), "deepspeed_config", None)
