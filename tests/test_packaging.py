"""Tests of the installed package: its files, and the modules that its import loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from itertools import chain
from pathlib import Path

import pytest
import require
from package_tree import ROOT, package_files, package_folders

import zerowatch

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "deepspeed", "prometheus_client")
DATA_FOLDERS = ("runtime", "metrics", "dashboards", "docker")
FOR_DEVELOPERS = {"dev", "docs", "integrations", "preview"}  # extras
PICTURES = "zerowatch/dashboards/pictures/"  # of the README
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".build", ".*_cache", "build", "runs", "*.egg-info", "__pycache__", "*.so"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools writes into the tree it builds. `tests` comes along: it must stay
    # out of the wheel by itself.
    source = shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE)
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names_in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which nothing but the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    command = ["pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", *command, str(wheel)], check=True)
    return folder


def run_installed(
    site: Path, cwd: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed program, outside of the checkout."""
    return subprocess.run(
        [site / "bin/zerowatch", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)} | variables,
        capture_output=True,
        text=True,
    )


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


def test_a_wheel_holds_the_extension_where_it_can_be_built(names_in_wheel: set[str]) -> None:
    require.program("gcc", apt="gcc")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("needs Python.h (apt-get install python3-dev)")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")

    assert f"zerowatch/runtime/common/_hot_path{suffix}" in names_in_wheel


def test_a_wheel_has_the_marker_for_type_checkers(names_in_wheel: set[str]) -> None:
    assert "zerowatch/py.typed" in names_in_wheel


def test_a_wheel_puts_only_zerowatch_at_the_top_level(names_in_wheel: set[str]) -> None:
    top = {name.partition("/")[0] for name in names_in_wheel}

    assert top == {"zerowatch", f"zerowatch-{zerowatch.__version__}.dist-info"}


def test_a_wheel_holds_every_file_of_the_package_that_is_not_a_module(
    names_in_wheel: set[str],
) -> None:
    files = [file for folder in DATA_FOLDERS for file in (ROOT / folder).rglob("*")]
    data = {
        f"zerowatch/{file.relative_to(ROOT).as_posix()}"
        for file in (*files, ROOT / "compose.yaml", ROOT / ".env.example")
        # Another version of Python may have built the extension in this checkout, too.
        if file.is_file() and file.suffix not in (".py", ".pyc", ".so")
    }

    missing = data - names_in_wheel

    assert {name for name in missing if not name.startswith(PICTURES)} == set()
    assert "zerowatch/docker/trainer.Dockerfile" in data


def test_the_image_is_built_from_all_files_of_the_wheel(names_in_wheel: set[str]) -> None:
    ignored, *admitted = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    allowed = {line.removeprefix("!") for line in admitted if line.startswith("!")}
    sources = {name.split("/")[1] for name in names_in_wheel if name.startswith("zerowatch/")}

    assert ignored == "*"
    assert {name for name in sources if not name.endswith(".py")} <= allowed
    assert {"*.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= allowed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--version"], f"zerowatch, version {zerowatch.__version__}"),
        (["--help"], "report"),
        (["estimate", "ds.json", "--world", "8", "--params", "7B"], "Memory per rank"),
        (["dashboards", "--help"], "build"),
    ],
)
def test_a_command_of_the_installed_wheel_works(
    installed: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}'
    )

    done = run_installed(installed, tmp_path, *arguments)

    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


def test_the_installed_program_imports_the_installed_package(
    installed: Path, tmp_path: Path
) -> None:
    script = "import zerowatch; print(zerowatch.__file__)"

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.strip() == str(installed / "zerowatch/__init__.py")
    assert {path.name for path in installed.iterdir()} == {
        "bin",
        "zerowatch",
        f"zerowatch-{zerowatch.__version__}.dist-info",
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_program_prints_its_completion_for_a_shell(
    installed: Path, tmp_path: Path, shell: str
) -> None:
    if shell == "bash":
        require.program("bash", apt="bash")  # click asks it for its version

    done = run_installed(installed, tmp_path, _ZEROWATCH_COMPLETE=f"{shell}_source")

    assert done.returncode == 0
    assert f"_ZEROWATCH_COMPLETE={shell}_complete" in done.stdout
    assert "_zerowatch_completion" in done.stdout


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("zerowatch repo", {"report"}),
        ("zerowatch stack u", {"up"}),
        ("zerowatch report --fail", {"--fail-on"}),
    ],
)
def test_bash_completes_commands_and_options(
    installed: Path, tmp_path: Path, typed: str, expected: set[str]
) -> None:
    done = run_installed(
        installed,
        tmp_path,
        _ZEROWATCH_COMPLETE="bash_complete",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - 1),
    )

    assert {line.removeprefix("plain,") for line in done.stdout.splitlines()} == expected


def test_every_extra_is_documented() -> None:
    page = (ROOT / "docs/install.md").read_text()

    extras = PYPROJECT["project"]["optional-dependencies"].keys() - FOR_DEVELOPERS

    assert [extra for extra in extras if f"| `{extra}` |" not in page] == []


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


def test_a_name_of_an_extra_can_be_read_without_its_library(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(['accelerate', 'transformers', 'lightning']);"
        "from zerowatch import AccelerateTracker;"  # help(zerowatch) reads each name
        "print(AccelerateTracker.__doc__);"
        "AccelerateTracker()"
    )
    command = [sys.executable, "-c", script]

    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)

    assert "zerowatch[hf]" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: zerowatch.AccelerateTracker"
    )


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
