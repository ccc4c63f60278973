"""A copy of the repository, with a virtual environment of its own, in which a fault is planted."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.mutations.planted_faults import PlantedFault
from bench.mutations.recorded_tests import ROOT

_PACKAGES = ("site-packages", "dist-packages")
_GENERATING = ("dashboards/", "metrics/")


@contextmanager
def faulty_copy(fault: PlantedFault) -> Iterator[Path]:
    """Yield the root of a copy with the fault, whose `.venv` imports that copy."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-fault-") as name:
        copy = Path(name, "zerowatch")  # the environment finds the package by this name
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        output = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for file in output.split("\0")[:-1]:
            if (ROOT / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, copy / file)
        source = (copy / fault.file).read_text()
        if source.count(fault.old) != 1:
            raise RuntimeError(f"{fault.file}: the text of its fault must occur exactly once")
        (copy / fault.file).write_text(source.replace(fault.old, fault.new))
        _make_environment(copy)
        if fault.file.startswith(_GENERATING):  # else a test of fresh files would find any change
            build = [python_of(copy).with_name("zerowatch"), "dashboards", "build"]
            subprocess.run(build, cwd=copy, check=False, capture_output=True)
        yield copy


def python_of(copy: Path) -> Path:
    """Return the interpreter of a copy."""
    return copy / ".venv" / "bin" / "python"


def _make_environment(copy: Path) -> None:
    """Make an environment that has the packages of this one, but zerowatch from the copy."""
    folder, own = copy / ".venv", Path(sys.executable).parent
    venv.create(folder, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    shared = [path for path in sys.path if Path(path).name in _PACKAGES]
    # The folder of the copy comes first. .pth files of the shared folders are not read.
    (packages / "copy.pth").write_text("\n".join([str(copy.parent), *shared]) + "\n")
    for program in own.iterdir():
        target = folder / "bin" / program.name
        if target.exists() or not program.is_file():
            continue
        first, _, rest = program.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            target.write_bytes(f"#!{python_of(copy)}\n".encode() + rest)
            target.chmod(0o755)
        else:
            target.symlink_to(program.resolve())
    for name in (".deepspeed", ".installed"):  # for make, the older one first
        (folder / name).touch()
