"""Reads a DeepSpeed configuration, given as a path, a dict or base64 text."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import SettingsError

ZEROWATCH_KEY = "zerowatch"

_LARGEST_FILE = 2**20  # bytes; a longer argument file is data, not a configuration


def read_zerowatch_block(config: object) -> Mapping[str, Any]:
    """Return the "zerowatch" block of a configuration as given to deepspeed.initialize.

    It is empty if there is none, or if the configuration cannot be read: DeepSpeed reports that.

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
    """Return the content of a configuration; None if it is neither a mapping nor text.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is neither JSON, DeepSpeed's lax dialect included, nor such text in base64.
    """
    import hjson  # type: ignore[import-untyped]  # installed with DeepSpeed, which parses with it

    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        return None
    if os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            return hjson.loads(file.read())
    return hjson.loads(base64.urlsafe_b64decode(os.fspath(config)).decode())


def read_config(config: object) -> Mapping[str, Any]:
    """Return the content of a configuration; an empty mapping if it cannot be read."""
    try:
        content = parse_config(config)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}


def config_origin(config: object) -> str:
    """Return the file of a configuration. Hugging Face passes a dict that it read from one."""
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
