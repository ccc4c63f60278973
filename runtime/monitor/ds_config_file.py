"""Writes the ds config of a run into its folder, so that two runs can be compared later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.ds_config import ZEROWATCH_KEY
from ..common.report_files import write_or_warn

DS_CONFIG_FILE = "ds_config.json"
# Such as "comet": {"api_key": ...}. Numbers, such as counts of tokens, are no secrets.
_SECRET_NAME = re.compile(r"(^|_)(key|token|password|secret)$", re.IGNORECASE)
_HIDDEN = "(not recorded)"


def write_ds_config(folder: Path, engine: Any) -> None:
    """Write the ds config of an engine, readable by the owner only. An empty one is not written.

    The settings of zerowatch are in `settings.json`. Texts under names such as "api_key" are left
    out. Rank 0 calls this once for each attempt, so that the file has the configuration with which
    the attempt started.
    """
    given = engine.config if isinstance(engine.config, Mapping) else engine._config._param_dict
    config = {name: value for name, value in given.items() if name != ZEROWATCH_KEY}
    if config:
        # Hugging Face and scripts put objects such as dtypes into it.
        text = json.dumps(_without_secrets(config), indent=2, sort_keys=True, default=str) + "\n"
        write_or_warn(folder / DS_CONFIG_FILE, text, mode=0o600)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _HIDDEN
            if isinstance(each, str) and _SECRET_NAME.search(str(name))
            else _without_secrets(each)
            for name, each in value.items()
        }
    return [_without_secrets(each) for each in value] if isinstance(value, list | tuple) else value
