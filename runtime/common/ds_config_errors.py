"""Explains errors that DeepSpeed raises for a ds config, and warns of keys that it ignores.

The traceback of an error shows which function of DeepSpeed or Hugging Face raised the error. The
explanation depends on this function.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ...errors import DsConfigError
from .ds_config import config_origin, file_fault, read_config
from .fail_open import FailOpen

logger = logging.getLogger(__name__)

# The top-level keys that DeepSpeed 0.19.8 reads, and the key of zerowatch. The keys are a copy,
# because importing DeepSpeed takes seconds, and `zerowatch estimate` does not import DeepSpeed. A
# test compares the keys with DeepSpeed.
TOP_LEVEL_KEYS = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_parallel_size",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
        "zerowatch",
    ]
)
_SIMILARITY = 0.85  # difflib ratio: one or two letters differ; other unknown keys are the user's

# An error from within one of these functions, by qualified name, is about the configuration.
_READERS = ("DeepSpeedConfig.__init__", "load_ds_config")
# An error that one of these functions raises itself is about the key next to it.
_ENGINE_READERS = {
    "DeepSpeedEngine._do_sanity_check": "optimizer.type",
    "DeepSpeedEngine._configure_basic_optimizer": "optimizer.params",
    "DeepSpeedEngine._do_optimizer_sanity_check": "zero_allow_untested_optimizer",
    "DeepSpeedEngine._scheduler_from_config": "scheduler.type",
}
_BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_BLOCKS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "comms_logger")


_NO_LAUNCHER = (
    "Without a launcher, DeepSpeed looks for MPI. Start the script with `zerowatch run`; in a "
    "notebook set RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR=127.0.0.1 and MASTER_PORT in "
    "os.environ first."
)


class ConfigErrors(AbstractContextManager[None]):
    """Explains configuration errors in a `with` block. All errors are still raised."""

    def __init__(self, config: object, fail_open: FailOpen, *, raise_ours: bool = False) -> None:
        """Prepare for one call of deepspeed.initialize.

        Args:
            config: The configuration as given to deepspeed.initialize.
            fail_open: Wraps the explanation, so that its failure does not replace the error.
            raise_ours: Whether to raise DsConfigError from DeepSpeed's error. By default
                DeepSpeed's own error, which a script may catch, is raised with the attribute
                `zerowatch_explanation`.
        """
        self._config = config
        self._explain = fail_open.wrap("ds config", explain_config_error)
        self._raise_ours = raise_ours

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Explain the error, if there is one."""
        if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
            error.add_note(_NO_LAUNCHER)
        explanation = None if error is None else self._explain(error, self._config)
        if error is None or explanation is None:
            return
        error.zerowatch_explanation = explanation  # type: ignore[attr-defined]
        if self._raise_ours:
            raise DsConfigError(explanation) from error


def warn_of_misspelled_keys(config: object) -> None:
    """Log a warning for each top-level key that is nearly a key of DeepSpeed."""
    for key, meant in misspelled_keys(read_config(config)):
        logger.warning(
            "%s: DeepSpeed does not know the key %r and ignores it; did you mean %r?",
            config_origin(config),
            key,
            meant,
        )


def misspelled_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each top-level key that is nearly a key of DeepSpeed, and DeepSpeed's key."""
    for key in config:
        close = difflib.get_close_matches(key, TOP_LEVEL_KEYS, n=1, cutoff=_SIMILARITY)
        if key not in TOP_LEVEL_KEYS and close:
            yield key, close[0]


def explain_config_error(error: BaseException, config: object) -> str | None:
    """Return the file and the key that made deepspeed.initialize fail, and what to do.

    Args:
        error: The error that deepspeed.initialize raised, with its traceback.
        config: The configuration as given to deepspeed.initialize: a path, a dict or base64. None
            to find out whether Hugging Face was reading a configuration when `error` was raised.

    Returns:
        One line, or None if the error is not about the configuration.
    """
    if config is None:
        config = _local(error, "HfDeepSpeedConfig.__init__", "config_file_or_dict")
    elif not _raised_by_reader(error):
        return None
    if config is None or not isinstance(error, Exception):  # such as Ctrl-C
        return None
    fault = file_fault(config, error) or value_fault(error, read_config(config))
    return f"{config_origin(config)}: {fault}"


def value_fault(error: BaseException, content: Mapping[str, Any]) -> str:
    """Return the fault that an error of DeepSpeed reports, and the key if it can be found.

    Args:
        error: The error that DeepSpeed raised while it read the configuration.
        content: The content of the configuration.
    """
    if isinstance(error, ValidationError):
        return _model_fault(error, content)
    message = str(error).partition("\n")[0]
    innermost = _frames(error)[-1].f_code.co_qualname
    if key := _ENGINE_READERS.get(innermost):
        return f"{key}: {message}"
    if isinstance(error, TypeError | AttributeError):  # DeepSpeed fails if a value has a wrong type
        for key in (each for each in _BLOCKS if not isinstance(content.get(each, {}), Mapping)):
            return f"{key!r} must be an object, got {content[key]!r}"
        for key in (each for each in _BATCH_KEYS if not isinstance(content.get(each, 1), int)):
            return f"{key!r} must be an integer, got {content[key]!r}"
    return message


def _model_fault(error: ValidationError, content: Mapping[str, Any]) -> str:
    """Return the first key that one of DeepSpeed's pydantic models refused."""
    fault = error.errors()[0]
    key = ".".join(map(str, _full_path(content, fault["loc"], fault["input"])))
    if fault["type"] != "extra_forbidden":
        return f"{key}: {_without_duplicates(fault)}, got {fault['input']!r}"
    model = type(_local(error, "DeepSpeedConfigModel.__init__", "self"))
    close = difflib.get_close_matches(str(fault["loc"][-1]), _known_keys(model, fault["loc"]), n=1)
    return f"unknown key {key!r}; " + (
        f"did you mean {close[0]!r}?" if close else "remove it, or look it up in DeepSpeed's manual"
    )


def _without_duplicates(fault: ErrorDetails) -> str:
    """Return pydantic's message without repeated values of an enum."""
    if fault["type"] != "enum":
        return fault["msg"]
    expected = fault["ctx"]["expected"]
    *values, last = dict.fromkeys(re.split(r", | or ", expected))
    allowed = f"{', '.join(values)} or {last}" if values else last
    return fault["msg"].replace(expected, allowed)


def _full_path(
    content: Mapping[str, Any], path: Sequence[int | str], value: object
) -> Sequence[int | str]:
    """Return the path of a key in the configuration. The error has only the path in its block."""
    for prefix, block in _blocks(content):
        node: Any = block
        for part in path:
            node = node.get(part) if isinstance(node, Mapping) else None
        if node == value:
            return (*prefix, *path)
    return path


def _blocks(
    node: Mapping[str, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    yield prefix, node
    for key, inner in node.items():
        if isinstance(inner, Mapping):
            yield from _blocks(inner, (*prefix, key))


def _known_keys(model: type, path: Sequence[int | str]) -> list[str]:
    """Return the keys valid at the last part of `path`, starting from a pydantic model."""
    for part in path[:-1]:
        field = _fields(model).get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        model = next(models, type(None))
    return list(_fields(model))


def _fields(model: type) -> Mapping[str, FieldInfo]:
    return model.model_fields if issubclass(model, BaseModel) else {}


def _raised_by_reader(error: BaseException) -> bool:
    names = [frame.f_code.co_qualname for frame in _frames(error)]
    return any(name in _READERS for name in names) or names[-1:] in (
        [name] for name in _ENGINE_READERS
    )


def _local(error: BaseException, function: str, name: str) -> object:
    """Return a local variable of the innermost call of `function` in the traceback."""
    for frame in reversed(_frames(error)):
        if frame.f_code.co_qualname == function:
            return frame.f_locals.get(name)
    return None


def _frames(error: BaseException) -> list[FrameType]:
    frames = []
    link = error.__traceback__
    while link is not None:
        frames.append(link.tb_frame)
        link = link.tb_next
    return frames
