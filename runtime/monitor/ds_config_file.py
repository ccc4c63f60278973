"""Writes the ds config of a run into its folder, so that two runs can be compared later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..common.ds_config import ZEROWATCH_KEY, ds_config_of
from ..common.hidden_secrets import without_secrets
from ..common.retried_files import RetriedFiles

DS_CONFIG_FILE = "ds_config.json"


def write_ds_config(folder: Path, engine: Any, files: RetriedFiles) -> None:
    """Write the ds config of an engine, readable by the owner only. An empty one is not written.

    The settings of zerowatch are in `settings.json`. Secrets are left out (`hidden_secrets.py`).
    Rank 0 calls this once for each attempt, so that the file has the configuration with which the
    attempt started.
    """
    config = {name: value for name, value in ds_config_of(engine).items() if name != ZEROWATCH_KEY}
    if config:
        # Hugging Face and scripts put objects such as dtypes into it.
        text = json.dumps(without_secrets(config), default=str)
        # Infinity and NaN become text, because JSON has no such numbers.
        content = json.loads(text, parse_constant=str)
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        files.write(folder / DS_CONFIG_FILE, text, mode=0o600)
