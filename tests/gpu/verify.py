"""Verifies zerowatch on the GPUs of this machine: `make verify-gpu`.

    tests/gpu/verify.py [1|2|3]... [--only CHECK]... [--out FOLDER]   run parts, all by default
    tests/gpu/verify.py --list                                        name all checks
    tests/gpu/verify.py publish [FOLDER]                              update the documents

A part takes at most nine minutes, and may start on a new machine. Each check runs in a process of
its own; after a failure the others still run. FOLDER/part-N.json has the result, and
FOLDER/checks/CHECK/output.txt the output of a check. The exit status is 0 if nothing has failed, 1
if a check has, and 2 without a GPU.

Any Python with torch, pytest and zerowatch's dependencies can run this file. zerowatch itself need
not be installed: if it is not, a link to this checkout is put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `gpu`

from gpu.check_process import run_check
from gpu.checks import (
    CHECKS,
    PART_SECONDS,
    PARTS,
    Check,
    find_nvcc,
    has_python_header,
    nvcc_version,
)
from gpu.verification_table import console_table, published, write_documents

ROOT = Path(__file__).parents[2]
OUT = ROOT / ".build" / "verify-gpu"
RESULTS = Path(__file__).parent / "results"
NO_GPU = 2
# A check that starts with less time left would only be ended again.
_MIN_SECONDS = 15

Run = Callable[[Check, float], dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments ask for, and return the exit status."""
    parser = argparse.ArgumentParser(description="Verify zerowatch on the GPUs of this machine.")
    parser.add_argument("what", nargs="*", metavar="PART", help="1, 2, 3, or publish FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run it only")
    parser.add_argument("--list", action="store_true", help="name all checks, and run none")
    parser.add_argument("--out", type=Path, default=OUT, help=f"results, by default {OUT}")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(list_of_checks())
        return 0
    if asked.what[:1] == ["publish"]:
        publish(Path(asked.what[1]) if len(asked.what) > 1 else None)
        return 0
    unknown = {*asked.what} - {str(part) for part in PARTS}
    unknown |= {*asked.only} - {check.name for check in CHECKS}
    if unknown:
        parser.error(f"no such part or check: {', '.join(sorted(unknown))}")
    machine = facts()
    if isinstance(machine, str):
        print(machine, file=sys.stderr)
        return NO_GPU
    out = asked.out.resolve()
    chosen = [check for check in CHECKS if not asked.only or check.name in asked.only]
    variables = environment(OUT)
    results = []
    for part in [int(name) for name in asked.what] or PARTS:
        checks = [check for check in chosen if check.part == part]
        if checks:
            print(f"Part {part}: {PARTS[part]}", flush=True)
            result = run_part(part, checks, machine, runner(out, variables))
            write_result(out, result)
            print(console_table(result), flush=True)
            results.append(result)
    print(f"Results: {out}/part-N.json. To update the documents: tests/gpu/verify.py publish {out}")
    checks = [pair for result in results for pair in result["checks"].items()]
    failed = [name for name, check in checks if bad(check)]
    for name in failed:
        print(f"{name}: {out}/checks/{name}/output.txt. Again: tests/gpu/verify.py --only {name}")
    return int(bool(failed))


def list_of_checks() -> str:
    """Return a line for each check, by part: its name, its time limit and what it shows."""
    lines = []
    for part, covers in PARTS.items():
        lines.append(f"Part {part}: {covers}")
        lines += [
            f"  {check.name:20} {check.limit_seconds:4} s  {check.shows}{check.needs}"
            for check in CHECKS
            if check.part == part
        ]
    return "\n".join(lines)


def run_part(
    part: int,
    checks: Sequence[Check],
    machine: Mapping[str, Any],
    run: Run,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the checks of a part one after the other, and return its result.

    Args:
        part: Its number.
        checks: In the order in which they run.
        machine: The result of `facts`.
        run: Runs a check with a time limit in seconds.
        now: A monotonic clock, in seconds.
    """
    ends, found = now() + PART_SECONDS, {}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    for check in checks:
        left = ends - now()
        reason = check.missing(machine["num_gpus"])
        if reason is not None:
            found[check.name] = {"outcome": "skipped", "reason": reason}
        elif left < _MIN_SECONDS:
            reason = f"the {PART_SECONDS // 60} minutes of the part were over"
            found[check.name] = {"outcome": "not run", "reason": reason}
        else:
            print(f"  {check.name} ...", end="", flush=True)
            found[check.name] = run(check, min(check.limit_seconds, left))
            print(f" {found[check.name]['outcome']}", flush=True)
        found[check.name]["date"] = date
    seconds = round(now() - ends + PART_SECONDS, 1)
    return {
        "part": part,
        "seconds": seconds,
        "machine": dict(machine),
        "checks": found,
    }


def runner(out: Path, variables: Mapping[str, str]) -> Run:
    """Return a function that runs a check by pytest, with its output in a folder of its own."""

    def run(check: Check, limit_seconds: float) -> dict[str, Any]:
        folder = out / "checks" / check.name
        shutil.rmtree(folder, ignore_errors=True)
        return run_check(
            command(check),
            folder=folder,
            limit_seconds=limit_seconds,
            environment=visible(variables, check.num_gpus),
        )

    return run


def command(check: Check) -> list[str]:
    """Return the command that runs a check. Warnings of another version of torch are no errors."""
    files = [str(Path(__file__).parent / name) for name in check.files]
    options = ["-q", "-W", "default", "--tb=short", "-p", "no:cacheprovider"]
    place = [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    return [sys.executable, "-m", "pytest", *files, *options, *place, *check.select]


def visible(variables: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Return the variables with as many visible GPUs as a check needs."""
    listed = variables.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    return {**variables, "CUDA_VISIBLE_DEVICES": ",".join(listed.split(",")[:num_gpus])}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the checks, in which `import zerowatch` finds this checkout.

    Args:
        folder: For compiled kernels and the link to the checkout.
    """
    # DeepSpeed compiles for this GPU, and cannot read a list of architectures with "9.0a".
    left_out = ("ZEROWATCH_", "TORCH_CUDA_ARCH_LIST")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    paths = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    if not imports_this_checkout():
        build_extension(ROOT / "runtime" / "common")
        paths.insert(0, str(make_site(folder / "site")))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "DS_ACCELERATOR": "cuda",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same products whatever stream they run on
        "TOKENIZERS_PARALLELISM": "false",
    }


def imports_this_checkout() -> bool:
    """Return whether an installed zerowatch is this checkout."""
    found = importlib.util.find_spec("zerowatch")
    return (
        found is not None
        and found.origin is not None
        and Path(found.origin).resolve().parent == ROOT.resolve()
        and any(importlib.metadata.distributions(name="zerowatch"))
    )


def build_extension(folder: Path) -> Path | None:
    """Build zerowatch's extension in C for this Python, unless a newer one is there.

    Args:
        folder: For the built module.

    Returns:
        The module, or None without a compiler or Python.h: then the hot path is in Python. An older
        module is removed.
    """
    built = folder / f"_hot_path{sysconfig.get_config_var('EXT_SUFFIX')}"
    source = ROOT / "runtime" / "common" / "_hot_path.c"
    compiler = shutil.which("gcc")
    if built.exists() and built.stat().st_mtime >= source.stat().st_mtime:
        return built
    if compiler is None or not has_python_header():
        built.unlink(missing_ok=True)
        return None
    options = ["-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([compiler, *options, str(source), "-o", str(built)], check=True)
    return built


def make_site(folder: Path) -> Path:
    """Make a folder for PYTHONPATH with this checkout as an installed package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    information = folder / f"zerowatch-{project['version']}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: zerowatch\nVersion: {project['version']}\n"
    (information / "METADATA").write_text(metadata)
    link = folder / "zerowatch"
    if not link.is_symlink():
        link.symlink_to(ROOT.resolve(), target_is_directory=True)
    return folder


def facts() -> dict[str, Any] | str:
    """Return the versions and GPUs of this machine, or the reason why nothing can be verified."""
    try:
        import torch
    except ImportError as error:
        return f"verify-gpu: nothing was verified: torch cannot be imported ({error})"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"verify-gpu: nothing was verified: torch {torch.__version__} was built without CUDA. "
            f"Install the build with CUDA, from PyPI: "
            f"{sys.executable} -m pip install --force-reinstall -c constraints.txt torch"
        )
    if not torch.cuda.is_available():
        return f"verify-gpu: nothing was verified: torch {torch.__version__} finds no GPU"
    nccl = torch.cuda.nccl.version()
    return {
        "gpu": torch.cuda.get_device_name(0),
        "num_gpus": torch.cuda.device_count(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: version(name) for name in ("deepspeed", "nvidia-ml-py", "transformers")},
        "commit": commit(),
        "nvcc": find_nvcc(),
        "nvcc_version": nvcc_version(),
    }


def version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the version of the GPU's driver, or None."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def commit() -> str | None:
    """Return the commit of this checkout, with "+" if files have changed, or None without git."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = found and _output("git", "-C", str(ROOT), "status", "--porcelain")
    return f"{found}+" if changed else found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write the result of a part; checks that did not run now keep their results of this commit."""
    file = out / f"part-{result['part']}.json"
    if file.exists():
        before = json.loads(file.read_text())
        if before["machine"] == result["machine"]:
            result = {**result, "checks": {**before["checks"], **result["checks"]}}
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=str) + "\n")


def publish(folder: Path | None = None) -> None:
    """Copy the results of a folder to `tests/gpu/results/`, and update the documents from them.

    Args:
        folder: None for the results of the last run, or if there are none, for none. The documents
            then have only the checks as they are now.
    """
    files = sorted((folder or OUT).glob("part-*.json"))
    if folder is not None and not files:
        raise SystemExit(f"verify-gpu: {folder} has no part-N.json")
    for file in files:
        RESULTS.mkdir(exist_ok=True)
        result = published(json.loads(file.read_text()))
        (RESULTS / file.name).write_text(json.dumps(result, indent=1) + "\n")
    write_documents(ROOT, RESULTS)


def bad(check: Mapping[str, Any]) -> bool:
    """Return whether a check was run and has not passed."""
    return check["outcome"] in ("failed", "timed out", "crashed", "not run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
