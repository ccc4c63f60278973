"""Reads the DeepSpeed configuration, and says in one line what is wrong with it.

It knows where DeepSpeed and Hugging Face read a configuration, and nothing of what the keys mean.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ...errors import SettingsError

ZEROWATCH_KEY = "zerowatch"

# An error that comes from within one of these, by qualified name, is about the configuration.
_READERS = ("DeepSpeedConfig.__init__", "load_ds_config")
# Of these, only an error that they raise themselves, and about which key.
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
_LARGEST_FILE = 2**20  # bytes; a longer argument file is data, not a configuration


def read_zerowatch_block(config: object) -> Mapping[str, Any]:
    """Return the "zerowatch" block of a configuration as given to deepspeed.initialize.

    It is empty where there is none, or where the configuration cannot be read: that is DeepSpeed's
    to say.

    Raises:
        SettingsError: The block is not an object.
    """
    block = read_config(config).get(ZEROWATCH_KEY, {})
    if not isinstance(block, Mapping):
        raise SettingsError(
            f'"{ZEROWATCH_KEY}" in the ds config must be an object of settings, got {block!r}'
        )
    return block


def explain_config_error(error: BaseException, config: object) -> str | None:
    """Name the file and the key that made deepspeed.initialize fail, and what to do.

    Args:
        error: What it raised, with its traceback.
        config: The configuration as given to deepspeed.initialize: a path, a dict or base64. None
            to ask whether Hugging Face was reading a configuration when `error` was raised.

    Returns:
        One line, or None where the error has nothing to do with the configuration.
    """
    if config is None:
        config = _local(error, "HfDeepSpeedConfig.__init__", "config_file_or_dict")
    elif not _raised_by_reader(error):
        return None
    if config is None or not isinstance(error, Exception):  # a Ctrl-C explains itself
        return None
    fault = _file_fault(config, error) or _value_fault(error, read_config(config))
    return f"{config_origin(config)}: {fault}"


def _read(config: object) -> Any:
    """Return what a configuration holds; None if it is neither a mapping nor text.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON, not even in DeepSpeed's lax dialect, nor such text in base64.
    """
    import hjson  # type: ignore[import-untyped]  # comes with DeepSpeed, which reads by it too

    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        return None
    if os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            return hjson.loads(file.read())
    return hjson.loads(base64.urlsafe_b64decode(os.fspath(config)).decode())


def read_config(config: object) -> Mapping[str, Any]:
    """Return what a configuration holds; nothing where it cannot be read."""
    try:
        content = _read(config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _file_fault(config: object, error: BaseException) -> str | None:
    """Say why a configuration cannot be read at all, if so."""
    if isinstance(config, Mapping):
        return None
    if not isinstance(config, str):
        return f"DeepSpeed takes a str or a dict here, got a {type(config).__name__}"
    try:
        content = _read(config)
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
    """Say where a file is no JSON.

    The strict parser points at the fault, the lax one often at the end of the file. Only where the
    strict one stumbles over a comment, which DeepSpeed allows, is the lax one's place better.
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


def _value_fault(error: BaseException, content: Mapping[str, Any]) -> str:
    if isinstance(error, ValidationError):
        return _model_fault(error, content)
    message = str(error).partition("\n")[0]
    innermost = _frames(error)[-1].f_code.co_qualname
    if key := _ENGINE_READERS.get(innermost):
        return f"{key}: {message}"
    if isinstance(error, TypeError | AttributeError):  # DeepSpeed stumbled over a value's type
        for key in (each for each in _BLOCKS if not isinstance(content.get(each, {}), Mapping)):
            return f"{key!r} must be an object, got {content[key]!r}"
        for key in (each for each in _BATCH_KEYS if not isinstance(content.get(each, 1), int)):
            return f"{key!r} must be an integer, got {content[key]!r}"
    return message


def _model_fault(error: ValidationError, content: Mapping[str, Any]) -> str:
    """Say which key one of DeepSpeed's pydantic models refused; the first one only."""
    fault = error.errors()[0]
    key = ".".join(map(str, _full_path(content, fault["loc"], fault["input"])))
    if fault["type"] != "extra_forbidden":
        return f"{key}: {fault['msg']}, got {fault['input']!r}"
    model = type(_local(error, "DeepSpeedConfigModel.__init__", "self"))
    close = difflib.get_close_matches(str(fault["loc"][-1]), _known_keys(model, fault["loc"]), n=1)
    return f"unknown key {key!r}; " + (
        f"did you mean {close[0]!r}?" if close else "remove it, or look it up in DeepSpeed's manual"
    )


def _full_path(
    content: Mapping[str, Any], path: Sequence[int | str], value: object
) -> Sequence[int | str]:
    """Prepend the block that a model was made from, which its error does not tell."""
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
    """Return the keys that stand beside the last part of `path`, seen from a pydantic model."""
    for part in path[:-1]:
        field = _fields(model).get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        model = next(models, type(None))
    return list(_fields(model))


def _fields(model: type) -> Mapping[str, FieldInfo]:
    return model.model_fields if issubclass(model, BaseModel) else {}


def config_origin(config: object) -> str:
    """Return the file of a configuration; Hugging Face passes on a dict that it read from one."""
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


def _raised_by_reader(error: BaseException) -> bool:
    names = [frame.f_code.co_qualname for frame in _frames(error)]
    return any(name in _READERS for name in names) or names[-1:] in (
        [name] for name in _ENGINE_READERS
    )


def _local(error: BaseException, function: str, name: str) -> object:
    """Return a local variable of the innermost call of `function` that `error` went through."""
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
