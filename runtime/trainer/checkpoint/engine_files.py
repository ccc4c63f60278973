"""The engine's own files: written and read by DeepSpeed, each rank its shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ...common.patching import AttributePatch
from .manifest import EngineFacts
from .rank_file import refused

# Where it is missing, a disk that is full for this file leaves the other ranks waiting.
_COPY = "_copy_recovery_script"


def engine_facts(engine: Any) -> EngineFacts:
    """Describe an engine as far as it matters for its files."""
    kinds = (type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__)
    return EngineFacts(
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
    """Whether this rank tends the folder: one rank, or one of each node with a disk of its own."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return int(rank) == 0


def write_engine(engine: Any, folder: Path, name: str) -> None:
    """Have DeepSpeed write this rank's files; all ranks must call it.

    DeepSpeed ends with a barrier, so that a rank which raised on its way there would leave the
    others waiting for it. What a disk refuses is therefore raised only after that.

    Raises:
        OSError: The disk refuses.
        CheckpointError: The configured writer returns before the files are whole.
    """
    if engine.checkpoint_engine.is_decoupled():
        raise CheckpointError(
            "a TrainingRun cannot be saved with an asynchronous checkpoint writer, as it must know "
            "when the files are whole; take `checkpoint.writer` out of the DeepSpeed configuration"
        )
    failures: list[OSError] = []
    with ExitStack() as undo:
        for owner, method in ((engine.checkpoint_engine, "save"), (engine, _COPY)):
            if hasattr(owner, method):
                wrap = AttributePatch(owner, method, lambda original: _kept(original, failures))
                undo.callback(wrap.restore)
        engine.save_checkpoint(str(folder), tag=name, save_latest=False)
    if failures:
        raise failures[0]


def read_engine(engine: Any, folder: Path, name: str) -> None:
    """Have DeepSpeed read this rank's files; all ranks must call it.

    Raises:
        CheckpointError: DeepSpeed cannot.
    """
    clip = getattr(engine.optimizer, "clip_grad", None)
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=name)
    except (RuntimeError, KeyError, ValueError, AssertionError) as error:
        raise CheckpointError(f"DeepSpeed cannot load {folder / name}: {error}") from error
    if path is None:
        raise CheckpointError(f"DeepSpeed finds nothing to load in {folder / name}")
    if clip is not None:  # the file's would go before the configuration's
        engine.optimizer.clip_grad = clip


def _kept(original: Callable[..., Any], failures: list[OSError]) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except OSError as error:
            failures.append(error)
        except RuntimeError as error:  # how torch tells of a disk
            failures.append(refused("a file of the engine", error))
        return None

    return write
