"""Whether NVMe offloading can be tried here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def why_not_nvme() -> str | None:
    """Return why DeepSpeed's asynchronous I/O cannot be used at once, if so."""
    if shutil.which("g++") is None:
        return "needs g++"
    command = ["g++", "-E", "-include", "libaio.h", "-xc++", os.devnull]
    if subprocess.run(command, capture_output=True).returncode:
        return "needs libaio.h (apt-get install libaio-dev)"
    built = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    if not any(Path(built).rglob("async_io.so")):
        return "needs DeepSpeed's async_io, which takes minutes to build at its first use"
    return None
