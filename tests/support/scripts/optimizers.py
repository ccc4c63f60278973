"""DeepSpeed's optimizers, compiled for tests. As a script: compiles them, before any test does.

`make optimizers` needs only torch and DeepSpeed, so it runs while other packages are installed.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILDERS = ("FusedAdamBuilder", "CPUAdamBuilder")


def use_own_compiler() -> None:
    """Let this process and its children compile into `.build/`, by a script that calls CXX.

    If the environment names a folder, or `.build/` cannot be written, CXX is used as it is.
    """
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        return
    python = "python{}.{}".format(*sys.version_info[:2])
    versions = f"{python}-torch-{version('torch')}-deepspeed-{version('deepspeed')}"
    folder = ROOT / ".build" / versions
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
        os.environ["TESTS_CXX"] = os.environ.get("CXX", "c++")
        os.environ["CXX"] = str(ROOT / "tests" / "support" / "compiler" / "g++")


def load(name: str) -> None:
    """Load an optimizer, one of BUILDERS, and compile it before if that has not been done.

    Raises:
        RuntimeError: It could not be compiled.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(name).load(verbose=False)


def refuse_stale_locks() -> None:
    """End with a message if a build was killed: DeepSpeed would wait for it forever.

    Raises:
        SystemExit: Nobody holds a lock of torch's extensions.
    """
    # By its path: zerowatch itself may not be installed yet.
    locks = runpy.run_path(str(ROOT / "runtime" / "common" / "extension_locks.py"))
    stale = [lock for lock in locks["build_locks"](locks["extensions_root"]()) if not lock.builders]
    if stale:
        paths = " ".join(str(lock.path) for lock in stale)
        sys.exit(f"a killed build has left a lock for which this would wait forever: rm {paths}")


if __name__ == "__main__":
    use_own_compiler()
    refuse_stale_locks()
    for name in BUILDERS:
        load(name)
