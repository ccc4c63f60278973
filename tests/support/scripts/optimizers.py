"""DeepSpeed's optimizers, compiled for tests. As a script: compiles them, before any test does.

`make optimizers` needs only torch and DeepSpeed, so it runs while other packages are installed.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILDERS = ("FusedAdamBuilder", "CPUAdamBuilder")


def use_own_compiler() -> None:
    """Let this process and its children compile into `.build/`, by a script that calls CXX.

    If the environment names a folder, CXX is used as it is.
    """
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        python = "python{}.{}".format(*sys.version_info[:2])
        versions = f"{python}-torch-{version('torch')}-deepspeed-{version('deepspeed')}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(ROOT / ".build" / versions)
        os.environ["TESTS_CXX"] = os.environ.get("CXX", "c++")
        os.environ["CXX"] = str(ROOT / "tests" / "support" / "compiler" / "g++")


def load(name: str) -> None:
    """Load an optimizer, one of BUILDERS, and compile it before if that has not been done.

    Raises:
        RuntimeError: It could not be compiled.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(name).load(verbose=False)


if __name__ == "__main__":
    use_own_compiler()
    for name in BUILDERS:
        load(name)
