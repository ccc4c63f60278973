"""What is kept of a job that is tuned: under which name, and in which folder."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...metrics.settings import Settings
from .policy.history_file import HistoryFile, job_fingerprint


def open_history(engine: Any, settings: Settings, world_size: int) -> HistoryFile:
    """Return what is kept of the job that a DeepSpeed engine runs on `world_size` ranks.

    Its name is made of what must be the same for verdicts to hold in a later run.
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
    log = settings.run_log
    return log.folder / ".tuner" if log.enabled else None


def _process_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _is_gone(name: str) -> bool:
    """Whether a process has ended; one of another host is taken to have, as in a new container."""
    host, _, pid = name.rpartition("-")
    return host != socket.gethostname() or not Path("/proc", pid).exists()
