"""Reads DeepSpeed configurations as the user gives them, and adapts them to a TrainingRun.

A configuration is given as a path, a dict or base64 text, as deepspeed.initialize accepts it.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from ...errors import DsConfigError, SettingsError, shortened

logger = logging.getLogger(__name__)

ZEROWATCH_KEY = "zerowatch"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
MANAGED = "managed_gradient_accumulation"

_STAGES = (0, 1, 2, 3)
_LARGEST_FILE = 2**20  # bytes; a longer file is data, not a configuration


class EngineSource(Protocol):
    """Supplies the current engine of a run and its ds config. A rebuild replaces both."""

    @property
    def engine(self) -> Any:
        """Return the DeepSpeed engine in use."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the ds config of the engine in use."""


def read_zerowatch_block(config: object) -> Mapping[str, Any]:
    """Return the "zerowatch" block of a configuration as given to deepspeed.initialize.

    The result is empty if the configuration has no such block or cannot be read. DeepSpeed reports
    configurations that cannot be read.

    Raises:
        SettingsError: The block is not an object.
    """
    block = read_config(config).get(ZEROWATCH_KEY, {})
    if not isinstance(block, Mapping):
        raise SettingsError(
            f'"{ZEROWATCH_KEY}" in the ds config must be an object of settings, got {block!r}'
        )
    return block


def parse_config(config: object) -> Any:
    """Return the content of a configuration, or None unless it is a mapping, text or a path.

    Raises:
        OSError: The file cannot be read.
        ValueError: The text is neither JSON nor JSON in base64. Comments are allowed, as in
            DeepSpeed.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        return None
    if os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            return parse_text(file.read())
    return parse_text(base64.urlsafe_b64decode(os.fspath(config)).decode())


def parse_text(text: str, *, unique_keys: bool = False) -> Any:
    """Return the content of a configuration file, parsed as DeepSpeed does.

    Args:
        text: JSON, in which comments and trailing commas are allowed.
        unique_keys: Whether a duplicate key in an object is an error, as in DeepSpeed.

    Raises:
        ValueError: The text is not JSON.
    """
    import hjson  # type: ignore[import-untyped]  # installed with DeepSpeed, which parses with it

    hook = _unique_keys if unique_keys else dict
    try:
        return hjson.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("objects or lists are nested too deeply") from None
    except OverflowError:  # such as 1e400
        raise ValueError("a number is too large") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        names = ", ".join(repr(key) for key, number in counts.items() if number > 1)
        raise ValueError(f"the same key twice: {names}; DeepSpeed refuses that")
    return content


def read_config(config: object) -> Mapping[str, Any]:
    """Return the content of a configuration, or an empty mapping if it cannot be read."""
    try:
        content = parse_config(config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


def file_fault(config: object, error: BaseException | None = None) -> str | None:
    """Return why a configuration cannot be read, or None if it can be read.

    Args:
        config: The configuration as given to deepspeed.initialize.
        error: The error that DeepSpeed raised for the configuration, if any.
    """
    if isinstance(config, Mapping):
        return None
    if not isinstance(config, str):
        return f"DeepSpeed takes a str or a dict here, got a {type(config).__name__}"
    try:
        content = parse_config(config)
    except OSError as fault:
        return f"cannot be read: {fault.strerror}; give a JSON file"
    except ValueError as fault:
        if not os.path.exists(config):
            return f"no such file in {os.getcwd()}; check the path given to DeepSpeed"
        return _syntax_fault(config, fault)
    if not isinstance(content, Mapping):
        return "must hold one JSON object, { ... }"
    return _syntax_fault(config, error) if isinstance(error, json.JSONDecodeError) else None


def _syntax_fault(path: str, lax: ValueError) -> str:
    """Return where a file is not JSON.

    The strict parser locates the error. The lax parser often reports the end of the file instead.
    If the strict parser fails at a comment, which DeepSpeed allows, the location that the lax
    parser reports is better.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        json.loads(text)
    except json.JSONDecodeError as strict:
        fault = lax if text[strict.pos : strict.pos + 1] in ("#", "/") else strict
        line, column = getattr(fault, "lineno", strict.lineno), getattr(fault, "colno", "?")
        return f"not valid JSON at line {line}, column {column}: {getattr(fault, 'msg', fault)}"
    except UnicodeDecodeError as fault:
        return f"not a text file: {fault}"
    return f"not valid JSON: {lax}"


def config_origin(config: object) -> str:
    """Return the path of a configuration, for error messages.

    Hugging Face passes a dict. The file from which the dict was read is found by its content.
    """
    if not isinstance(config, Mapping):
        return str(config)
    given = [os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")]
    given += [argument.rpartition("=")[2] for argument in sys.argv[1:]]
    for path in given:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_FILE:
            continue
        content = read_config(path)
        if content and content.keys() <= config.keys():
            return path
    return "DeepSpeed configuration"


def training_config(config: object, *, is_candidate: bool = False) -> dict[str, Any]:
    """Return a copy of a ds config in which TrainingRun instead of the engine ends a window.

    Args:
        config: A mapping, or the path of a JSON file.
        is_candidate: Whether the config is only considered, so that no warning is logged.

    Raises:
        DsConfigError: The config cannot be read, lacks a micro-batch size, or has a wrong ZeRO
            stage.
    """
    level = logging.DEBUG if is_candidate else logging.WARNING
    if not isinstance(config, Mapping | str | os.PathLike):
        raise DsConfigError(
            "config must be a ds config as a dict, or the path of a JSON file, got "
            f"{shortened(config)}"
        )
    fault = file_fault(os.fspath(config) if isinstance(config, os.PathLike) else config)
    given = read_config(config)
    if fault is not None or not given:
        raise DsConfigError(f"{config_origin(config)}: {fault or 'is empty'}")
    ours = copy.deepcopy(dict(given))
    _check_micro_batch(ours, config)
    try:
        stage = zero_stage(ours)
    except DsConfigError as error:
        raise DsConfigError(f"{config_origin(config)}: {error}") from None
    # DeepSpeed requires that its batch sizes are consistent. Here the size of each batch decides.
    ours.pop("train_batch_size", None)
    ours["gradient_accumulation_steps"] = 1
    ours[MANAGED] = False
    zero = ours.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("overlap_comm") and stage < 2:
        # All gradients are reduced in step(), when no computation can overlap.
        ours["zero_optimization"] = {**zero, "overlap_comm": False}
        logger.log(
            level,
            "zero_optimization.overlap_comm disabled: it has no effect below stage 2, where a "
            "TrainingRun reduces gradients once per step",
        )
    fp16 = ours.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled") and stage == 0:
        logger.log(
            level,
            "fp16 at ZeRO stage 0: DeepSpeed 0.19 divides gradients by a loss scale that the loss "
            "was not multiplied by, so updates are too small. Use bf16, or stage 1",
        )
    return ours


def _check_micro_batch(ours: Mapping[str, Any], config: object) -> None:
    size = ours.get(MICRO_BATCH)
    if size is None and isinstance(ours.get("train_batch_size"), int):
        raise DsConfigError(
            f"{config_origin(config)}: give {MICRO_BATCH}, the samples of the first micro-batches; "
            "train_batch_size is what you pass to train_batch, over all ranks"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DsConfigError(
            f"{config_origin(config)}: {MICRO_BATCH} must be a whole number of samples, 1 or more, "
            f"got {size!r}"
        )


def ds_config_of(engine: Any) -> Mapping[str, Any]:
    """Return the ds config of an engine as the script has given it."""
    given = engine.config  # the path of a file, if the script has given one
    config: Mapping[str, Any] = given if isinstance(given, Mapping) else engine._config._param_dict
    return config


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested mapping with changes merged into it."""
    result = copy.deepcopy(dict(config))
    for name, value in changes.items():
        below = config.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[name] = merged(below, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a ds config asks for, as DeepSpeed reads it.

    Raises:
        DsConfigError: The stage is not one of DeepSpeed's stages.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return 1 if zero is True else 0  # true is an old way to write stage 1
    given = zero.get("stage", 0)
    try:
        stage = int(given)
    except (TypeError, ValueError, OverflowError):
        stage = None
    if stage not in _STAGES:
        raise DsConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {shortened(given)}")
    return int(stage)
