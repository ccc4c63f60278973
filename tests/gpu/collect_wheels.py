"""Collects wheels for `verify.py` on a machine without a network: `collect_wheels.py FOLDER 3.12`.

The versions are those of constraints.txt. Left out is what such a machine has: torch with its CUDA,
and the packages in `THERE`. DeepSpeed is built here, in pure Python, because it has no wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What an image for training has, by the names of the packages.
_THERE = """
attrs einops filelock fsspec jinja2 markdown-it-py markupsafe mdurl mpmath msgpack networkx ninja
numpy nvidia-ml-py packaging prometheus-client protobuf psutil py-cpuinfo pygments pytest requests
rich setuptools sympy torch tqdm transformers urllib3
"""
THERE = frozenset(_THERE.split())
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def main(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    versions = pins(ROOT.joinpath("constraints.txt").read_text().splitlines())
    wanted = [f"{name}=={versions[name]}" for name in needed(versions)]
    built = [each for each in wanted if each.startswith("deepspeed==")]
    loaded = [each for each in wanted if each not in built]
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    pip("wheel", "--no-build-isolation", "-w", str(folder), *built)
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    pip("download", *target, *platforms, "-d", str(folder), *loaded)
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB, in {folder}")


def pins(lines: Sequence[str]) -> dict[str, str]:
    """Return the pinned version of each package."""
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {normal(name): version for name, _, version in pairs}


def needed(versions: dict[str, str]) -> list[str]:
    """Return zerowatch's dependencies and theirs, as installed here, without what is `THERE`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    waiting = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    while waiting:
        name = name_of(waiting.pop())
        if name not in found | THERE and name in versions:
            found.add(name)
            waiting += dependencies(name)
    return sorted(found)


def dependencies(name: str) -> Iterator[str]:
    """Yield what a package installed here requires, without its extras."""
    try:
        yield from (each for each in requires(name) or () if "extra ==" not in each)
    except PackageNotFoundError:
        return


def name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return normal(found[0])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pip(command: str, *arguments: str) -> None:
    options = ["-q", "--no-deps", *arguments]
    subprocess.run(
        [sys.executable, "-m", "pip", command, *options],
        check=True,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
