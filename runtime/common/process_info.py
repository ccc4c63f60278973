"""Describes this process: its rank and host, its restarts, and the id of the run."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from ...metrics.settings import MAX_RUN_ID_LENGTH, RUN_ID_PATTERN


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Place of one process in its job.

    Attributes:
        rank: The rank in the job, counted from 0.
        local_rank: The rank on its node, counted from 0.
        world_size: Number of ranks in the job.
        host: Name of the node.
        attempt: How often the processes of this node have been restarted so far.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    attempt: int


def this_process() -> ProcessInfo:
    """Return this process, from the process group and the launcher's environment variables."""
    started = dist.is_initialized()
    return ProcessInfo(
        rank=dist.get_rank() if started else int(os.environ.get("RANK", 0)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        world_size=dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", 1)),
        host=socket.gethostname(),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def node_name(host: str) -> str:
    """Return the name of the machine that `host` is on: of a pod, the node if NODE_NAME has it.

    A pod's host name is the name of the pod, which shows nobody where to log in.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return (os.environ.get("NODE_NAME") if in_pod else None) or host


def new_run_id() -> str:
    """Return a unique run id. The ids sort by the time of their creation."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


def numbered_run_id(run_id: str, number: int) -> str:
    """Return the run id itself for the number 1, and the run id with a larger number appended."""
    ending = f"-{number}" if number > 1 else ""
    return run_id[: MAX_RUN_ID_LENGTH - len(ending)] + ending


def launcher_identity() -> str | None:
    """Return the same name in all attempts of torchrun's agent on this node, or None without one.

    The agent makes one folder with a random name for the error files of all attempts:
    `<folder>/attempt_<n>/<local rank>/error.json`.
    """
    attempt = _attempt_folder()
    return None if attempt is None else _digest(f"{socket.gethostname()} {attempt.parent}")


def launcher_start() -> str | None:
    """Return a name of the last start of workers by torchrun's agent on this node, or None.

    Processes that a worker starts get the same name. The agent makes the folder of the attempt
    again at each start. A restart after a change of nodes has the same attempt number and path.
    """
    attempt = _attempt_folder()
    if attempt is None:
        return None
    try:
        made = attempt.stat()
    except OSError:  # deleted: nobody can know
        return None
    # Of two folders with the same inode number, one after the other, the times differ.
    return _digest(f"{socket.gethostname()} {attempt} {made.st_ino} {made.st_mtime_ns}")


def _attempt_folder() -> Path | None:
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt if attempt.name.startswith("attempt_") else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def launcher_may_restart() -> bool:
    """Return whether torchrun was started with `--max-restarts`."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def launcher_run_id() -> str | None:
    """Return torchrun's id of the job if torchrun may restart it, else None.

    The id stays the same after a restart.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    is_valid = name != "none" and re.fullmatch(RUN_ID_PATTERN, name)
    return name if launcher_may_restart() and is_valid else None
