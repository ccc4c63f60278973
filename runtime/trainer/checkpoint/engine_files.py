"""Files of the engine in a checkpoint, one shard per rank, written and read by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ...common.collective_attempt import CollectiveAttempt, is_peer_failure, raise_on_all_ranks
from ...common.host_group import HostCollectives
from ...common.patching import AttributePatch
from ...common.peer_failures import FailureCapture
from ...engine.rebuild.engine_replacement import guarded_collectives
from .folder import EngineInfo
from .run_state import write_error
from .safe_load import plain_data_only

# Method that copies a script into the checkpoint. The method is wrapped too. Otherwise an error on
# a full disk would leave the other ranks waiting at the barrier.
_COPY = "_copy_recovery_script"

PARTLY_LOADED = "The engine may be partly loaded: load another checkpoint before training goes on"


def engine_info(engine: Any) -> EngineInfo:
    """Return the properties of an engine that its files depend on."""
    kinds = (type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__)
    return EngineInfo(
        zero_stage=int(engine.zero_optimization_stage()),
        world_size=int(engine.world_size),
        data_parallel_size=int(engine.seq_dp_world_size),
        optimizer=" over ".join(dict.fromkeys(kinds)),
        dtypes=" and ".join(str(dtype).removeprefix("torch.") for dtype in engine.get_data_types()),
        parameters={
            name: list(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in engine.module.named_parameters()
        },
    )


def is_writer_rank(engine: Any) -> bool:
    """Return whether this rank manages the folder: one rank, or one per node with a local disk."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return int(rank) == 0


WriteLater = Callable[[Callable[[Any, Path], object], Any, Path], None]


def write_engine(
    engine: Any, folder: Path, name: str, write_later: WriteLater | None = None
) -> list[Path]:
    """Write this rank's files by DeepSpeed, and return their paths; all ranks must call it.

    If `write_later` is given, it is called instead of the function that writes a state to a path,
    with that function, the state and the path. It must copy the state.

    DeepSpeed ends the save with a barrier. If a rank raised an error before the barrier, the other
    ranks would wait forever. So this function raises write errors only after the barrier.

    Raises:
        OSError: A file cannot be written.
        Exception: A state cannot be serialized, such as for lack of memory.
        CheckpointError: The configured writer returns before the files are complete. Or a rebuild
            has removed the engine's state.
    """
    if engine.optimizer is None:
        raise CheckpointError(
            "the engine has no optimizer: a rebuild has removed its state, and failed or was "
            "interrupted; load the last checkpoint in a new run"
        )
    if engine.checkpoint_engine.is_decoupled():
        raise CheckpointError(
            "a TrainingRun cannot be saved with an asynchronous checkpoint writer, which returns "
            "before the files are complete; remove `checkpoint.writer` from the ds config"
        )
    failures: list[Exception] = []
    written: list[Path] = []

    def recorded(save: Callable[..., Any]) -> Callable[..., Any]:
        def write(state_dict: Any, path: Any) -> Any:
            written.append(Path(path))
            named = _as_os_error(save, path)
            if write_later is not None:
                return write_later(named, state_dict, Path(path))
            return named(state_dict, Path(path))

        return _deferred(write, failures)

    with ExitStack() as undo:
        for owner, method, wrapper in (
            (engine.checkpoint_engine, "save", recorded),
            (engine, _COPY, lambda write: _deferred(write, failures)),
        ):
            if hasattr(owner, method):
                patch = AttributePatch(owner, method, wrapper)
                undo.callback(patch.restore)
        engine.save_checkpoint(str(folder), tag=name, save_latest=False)
    if failures:
        raise failures[0]
    return written


def read_engine(engine: Any, folder: Path, name: str, host_group: HostCollectives) -> None:
    """Read this rank's files by DeepSpeed. No code in the files is run. All ranks must call this.

    DeepSpeed calls collectives during the load. The ranks vote before each collective, so that no
    rank waits for a rank that failed.

    Raises:
        CheckpointError: DeepSpeed cannot load the files on this rank or another.
    """
    clip = getattr(engine.optimizer, "clip_grad", None)
    path = None
    attempt = CollectiveAttempt(host_group)
    with attempt, guarded_collectives(attempt), plain_data_only():
        path, _ = engine.load_checkpoint(str(folder), tag=name)
    error = attempt.error
    with raise_on_all_ranks(host_group, f"load {folder / name}", PARTLY_LOADED):
        if error is not None and not is_peer_failure(error):
            raise CheckpointError(
                f"DeepSpeed cannot load {folder / name}: {error}. {PARTLY_LOADED}"
            ) from error
        if error is None and path is None:
            raise CheckpointError(f"DeepSpeed finds nothing to load in {folder / name}")
    if clip is not None:  # restore the ds config's value, which the load replaced
        engine.optimizer.clip_grad = clip


def _as_os_error(save: Callable[..., Any], own_path: Any) -> Callable[[Any, Path], Any]:
    """Return `save` with its path as DeepSpeed passed it, and torch's errors as OSError."""

    def write(state_dict: Any, path: Path) -> Any:
        try:
            return save(state_dict, own_path)
        except RuntimeError as error:
            raise write_error(path, error) from error

    return write


def _deferred(original: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """Return `original` with errors appended to `failures` instead of raised."""

    def write(*args: Any, **kwargs: Any) -> Any:
        with FailureCapture() as capture:
            return original(*args, **kwargs)
        error = capture.take()
        if isinstance(error, RuntimeError):  # torch reports disk errors as RuntimeError
            error = write_error("a file of the engine", error)
        if error is not None:
            failures.append(error)
        return None

    return write
