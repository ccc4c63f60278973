"""Tests of the installed package: its files, and the modules that its import loads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from itertools import chain
from pathlib import Path

import pytest
from package_tree import ROOT, package_files, package_folders

import zerowatch

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "deepspeed", "prometheus_client")
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def names_in_wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools writes into the tree it builds. `tests` comes along: it must stay
    # out of the wheel by itself.
    source = shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def modules_after(statement: str, cwd: Path) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    return set(
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.split()
    )


def test_the_packages_in_pyproject_are_the_folders_on_disk() -> None:
    on_disk = {
        ".".join(("zerowatch", *folder.relative_to(ROOT).parts)) for folder in package_folders()
    }

    listed = PYPROJECT["tool"]["setuptools"]["packages"]

    assert sorted(listed) == sorted(on_disk)


def test_a_wheel_holds_every_module_and_no_other(names_in_wheel: set[str]) -> None:
    expected = {f"zerowatch/{file.as_posix()}" for file in package_files()}

    modules = {name for name in names_in_wheel if name.endswith(".py")}

    assert modules == expected


def test_a_wheel_has_the_marker_for_type_checkers(names_in_wheel: set[str]) -> None:
    assert "zerowatch/py.typed" in names_in_wheel


@pytest.mark.parametrize("module", ["zerowatch", "zerowatch.metrics.catalog"])
def test_importing_the_light_half_loads_no_heavy_library(module: str, tmp_path: Path) -> None:
    loaded = modules_after(f"import {module}", tmp_path)

    assert module in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_public_names_are_listed_before_they_are_imported(tmp_path: Path) -> None:
    script = (
        "import sys, zerowatch; names = set(dir(zerowatch));"
        "print({*zerowatch.__all__, '__version__'} <= names, *sys.modules)"
    )
    command = [sys.executable, "-c", script]

    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    are_listed, *loaded = done.stdout.split()
    assert are_listed == "True"
    assert set(loaded).isdisjoint(HEAVY)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert zerowatch.__version__ == version("zerowatch")


def test_the_console_command_resolves_to_a_function() -> None:
    (command,) = entry_points(group="console_scripts", name="zerowatch")

    assert callable(command.load())


def test_every_dependency_is_pinned() -> None:
    project = PYPROJECT["project"]
    required = [
        requirement
        for requirement in chain(
            project["dependencies"], *project["optional-dependencies"].values()
        )
        if normalized(requirement) != project["name"]  # an extra that takes in others
    ]
    constraints = (ROOT / "constraints.txt").read_text().splitlines()

    pinned = {normalized(line) for line in constraints if "==" in line}

    assert {normalized(line) for line in required} <= pinned


def normalized(requirement: str) -> str:
    """Spell the name in a requirement as PEP 503 does."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
