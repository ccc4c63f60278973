"""Opens the tuner's history of a job: its fingerprint, its folder, and this process's name."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...metrics.settings import Settings
from .policy.history_file import HistoryFile, job_fingerprint


def open_history(engine: Any, settings: Settings, world_size: int) -> HistoryFile:
    """Return the history of the job that a DeepSpeed engine runs on `world_size` ranks.

    The fingerprint covers what must be the same for verdicts to hold in a later run.
    """
    named = engine.module.named_parameters()
    key = job_fingerprint(
        {
            "parameters": [
                (name, list(getattr(each, "ds_shape", each.shape))) for name, each in named
            ],
            "optimizer": type(engine.basic_optimizer).__name__,
            "world_size": world_size,
            "device": engine.device.type,
            "versions": [version(name) for name in ("torch", "deepspeed", "zerowatch")],
            "numerics": settings.tuner.numerics,
            "rebuild": settings.tuner.rebuild,
        }
    )
    return HistoryFile(_folder(settings), key, owner=_process_name(), is_gone=_is_gone)


def _folder(settings: Settings) -> Path | None:
    if settings.tuner.history_dir is not None:
        return settings.tuner.history_dir
    run_log = settings.run_log
    return run_log.folder / ".tuner" if run_log.enabled else None


def _process_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _is_gone(name: str) -> bool:
    """Whether a process has ended; assumed of other hosts, e.g. after a restart in a container."""
    host, _, pid = name.rpartition("-")
    return host != socket.gethostname() or not Path("/proc", pid).exists()
