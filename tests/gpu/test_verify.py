"""The command `make verify-gpu` itself, which needs no GPU: limits, failures, results, tables."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.op_builder import builder
from fakes.scraper import eventually
from gpu import check_process, checks, collect_wheels, verify
from gpu.check_process import LINES_VARIABLE, read_lines, run_check
from gpu.checks import CHECKS, PART_SECONDS, PARTS, Check
from gpu.verification_table import (
    DOCUMENTS,
    NOT_YET,
    console_table,
    full_table,
    published,
    read_results,
    subject_table,
    with_table,
)

from zerowatch.metrics.catalog import CATALOG

HERE = Path(__file__).parent
MACHINE = {"gpu": "NVIDIA H100", "num_gpus": 1, "torch": "2.11.0", "commit": "abc"}
WRITE = f"""
import json, os, sys
def write(**entry):
    with open(os.environ[{LINES_VARIABLE!r}], "a") as file:
        file.write(json.dumps(entry) + "\\n")
"""
LONG = 60.0  # seconds, which no test here takes


def run_script(body: str, folder: Path) -> dict[str, Any]:
    return run_check(
        [sys.executable, "-c", WRITE + body],
        folder=folder,
        limit_seconds=LONG,
        environment={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")},
    )


def check(name: str, **changed: Any) -> Check:
    fields = {"part": 1, "subject": "memory", "shows": name, "files": [], "limit_seconds": 60}
    return Check(name=name, **{**fields, **changed})


def passed(test: str = "a") -> dict[str, Any]:
    return {
        "outcome": "passed",
        "seconds": 1.0,
        "tests": [{"test": test, "outcome": "passed", "seconds": 1.0}],
    }


def test_a_passed_check_has_its_tests_and_figures(tmp_path: Path) -> None:
    body = 'write(started="a")\nwrite(test="a", outcome="passed", figures={"ratio": 1.5})'

    result = run_script(body, tmp_path)

    assert result["outcome"] == "passed"
    assert result["tests"] == [{"test": "a", "outcome": "passed", "figures": {"ratio": 1.5}}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('write(test="a", outcome="failed", message="no"); sys.exit(1)', "failed"),
        ('write(test="a", outcome="passed"); os.abort()', "crashed"),
        ("sys.exit(5)  # pytest has found no test", "crashed"),
        ("pass", "crashed"),
        ('write(test="a", outcome="skipped", message="no nvcc")', "skipped"),
    ],
)
def test_a_failed_process_is_no_passed_check(body: str, expected: str, tmp_path: Path) -> None:
    result = run_script(body, tmp_path)

    assert result["outcome"] == expected
    assert ("output" in result) == (expected != "skipped")


def test_a_hanging_check_is_ended_with_its_children_and_keeps_what_had_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "tests.jsonl"

    def until_it_hangs(process: subprocess.Popen[bytes], limit_seconds: float) -> int:
        while not any("child" in entry for entry in read_lines(lines)):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, limit_seconds)

    monkeypatch.setattr(check_process, "wait_for", until_it_hangs)
    monkeypatch.setattr(check_process, "_GRACE_SECONDS", 0.1)
    body = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.makedirs({str(tmp_path / "extensions" / "op")!r})
open({str(tmp_path / "extensions" / "op" / "lock")!r}, "w").close()
write(test="a", outcome="passed")
write(started="b", child=child.pid)
time.sleep(600)
"""

    result = run_script(body, tmp_path)

    assert result["outcome"] == "timed out"
    assert result["reason"] == "after 60 s in b"
    assert [test["test"] for test in result["tests"]] == ["a"]
    assert not list(tmp_path.rglob("lock"))
    child = read_lines(lines)[-1]["child"]
    assert eventually(lambda: not is_running(child))  # a killed process needs a core to end


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_after_a_failure_the_other_checks_run() -> None:
    outcomes = {"one": "failed", "two": "timed out", "three": "passed"}

    def run(each: Check, limit_seconds: float) -> dict[str, Any]:
        return {**passed(), "outcome": outcomes[each.name]}

    result = verify.run_part(1, [check(name) for name in outcomes], MACHINE, run)

    found = {name: each["outcome"] for name, each in result["checks"].items()}
    assert found == outcomes
    assert [verify.bad(each) for each in result["checks"].values()] == [True, True, False]


def test_a_part_ends_after_nine_minutes_and_names_what_did_not_run() -> None:
    clock, limits = [0.0], []

    def run(each: Check, limit_seconds: float) -> dict[str, Any]:
        limits.append(limit_seconds)
        clock[0] += limit_seconds
        return passed()

    four = [check(f"check {number}", limit_seconds=200) for number in range(4)]

    result = verify.run_part(1, four, MACHINE, run, now=lambda: clock[0])

    assert limits == [200, 200, 140]
    assert result["checks"]["check 3"]["outcome"] == "not run"
    assert verify.bad(result["checks"]["check 3"])
    assert result["seconds"] == PART_SECONDS == 540


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"num_gpus": 2}, "needs 2 GPUs"), ({"needs_nvcc": True}, "needs nvcc")],
)
def test_what_a_machine_lacks_is_the_reason_of_a_skipped_check(
    changed: Mapping[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_nvcc", lambda: None)

    result = verify.run_part(1, [check("one", **changed)], MACHINE, lambda *_: pytest.fail("run"))

    assert result["checks"]["one"]["outcome"] == "skipped"
    assert reason in result["checks"]["one"]["reason"]
    assert not verify.bad(result["checks"]["one"])


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "is_refused"),
    [
        ("12.8", "12.8", False),
        ("12.4", "12.8", False),
        ("12.8", "13.0", True),
        ("13.1", "13.0", True),  # DeepSpeed lists no minor versions of 13 that fit together
        ("12.8", None, True),
    ],
)
def test_kernels_need_the_nvcc_that_deepspeed_accepts(
    nvcc: str,
    torch_cuda: str | None,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.89'\n")
    program.chmod(0o755)
    monkeypatch.setattr(checks, "find_nvcc", lambda: str(program))
    monkeypatch.setattr(builder, "installed_cuda_version", lambda _: map(int, nvcc.split(".")))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)

    reason = checks.missing_for_deepspeed_kernels()

    assert (reason is not None) == is_refused
    if torch_cuda is not None and is_refused:
        assert reason is not None
        assert nvcc in reason
        assert torch_cuda in reason
        with pytest.raises(builder.CUDAMismatchException):
            builder.assert_no_cuda_mismatch()
    elif torch_cuda is not None:
        assert builder.assert_no_cuda_mismatch()


def test_what_torch_compile_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    no_compiler = checks.missing_for_triton()
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    no_header = checks.missing_for_triton()
    (tmp_path / "Python.h").touch()

    assert "C compiler" in str(no_compiler)
    assert "Python.h" in str(no_header)
    assert checks.missing_for_triton() is None


@pytest.mark.parametrize(
    ("cuda", "said"),
    [("12.8", "finds no GPU"), (None, "was built without CUDA. Install the build with CUDA")],
)
def test_without_a_gpu_one_line_says_so_and_the_exit_status_is_2(
    cuda: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)

    status = verify.main([])

    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert f"torch {torch.__version__} {said}" in line


@pytest.mark.parametrize(("outcome", "status"), [("passed", 0), ("failed", 1)])
def test_each_part_leaves_a_result_that_can_be_published(
    outcome: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "facts", lambda: MACHINE)
    monkeypatch.setattr(verify, "runner", lambda *_: lambda *_: {**passed(), "outcome": outcome})
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((verify.ROOT / name).read_text())

    ended = verify.main(["1", "3", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setattr(verify, "RESULTS", tmp_path / "results")
    verify.main(["publish", str(tmp_path / "out")])

    assert ended == status
    assert sorted(each.name for each in (tmp_path / "out").glob("*.json")) == [
        "part-1.json",
        "part-3.json",
    ]
    readme = (tmp_path / "README.md").read_text()
    assert ("NVIDIA H100, torch 2.11.0" in readme) == (outcome == "passed")
    assert ("cost: failed" in readme) == (outcome == "failed")
    assert f"| several GPUs | {NOT_YET} |" in readme
    printed = capsys.readouterr().out
    assert ("checks/cost/output.txt. Again: tests/gpu/verify.py --only cost" in printed) == (
        outcome == "failed"
    )


def test_an_unknown_part_or_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["4"], ["--only", "colectives"]):
        with pytest.raises(SystemExit):
            verify.main(arguments)

    assert "colectives" in capsys.readouterr().err


def test_a_checkout_that_is_not_installed_is_put_on_the_path(tmp_path: Path) -> None:
    site = verify.make_site(tmp_path / "site")

    script = "import zerowatch; print(zerowatch.__version__, zerowatch.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{verify.make_site(site)}{os.pathsep}{os.pathsep.join(sys.path)}"},
    )

    assert done.stdout.split() == ["0.1.0", str(site / "zerowatch" / "__init__.py")], done.stderr


def test_the_wheels_for_a_machine_without_a_network_are_all_but_what_it_has() -> None:
    versions = collect_wheels.pins(["# comment", "torch==2.13.0", "pydantic_core==2", "hjson==3"])

    pinned = (verify.ROOT / "constraints.txt").read_text().splitlines()
    needed = collect_wheels.needed(collect_wheels.pins(pinned))

    assert versions == {"torch": "2.13.0", "pydantic-core": "2", "hjson": "3"}
    assert {"deepspeed", "hjson", "pydantic-settings", "pydantic-core"} <= set(needed)
    assert not {"torch", "numpy", "pytest", "networkx", "ruff"} & set(needed)


def test_a_check_of_one_gpu_sees_one_of_several() -> None:
    assert verify.visible({}, 2)["CUDA_VISIBLE_DEVICES"] == "0,1"
    several = {"CUDA_VISIBLE_DEVICES": "GPU-7,GPU-8"}
    assert verify.visible(several, 1)["CUDA_VISIBLE_DEVICES"] == "GPU-7"


def test_each_test_of_a_gpu_belongs_to_a_check_and_each_check_to_a_part() -> None:
    files = {file.name for file in HERE.glob("test_gpu_*.py")}

    assert {name for each in CHECKS for name in each.files} == files
    assert {each.part for each in CHECKS} == set(PARTS)
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    assert all(each.limit_seconds <= PART_SECONDS for each in CHECKS)


def test_a_check_by_pytest_has_a_line_for_each_test(tmp_path: Path) -> None:
    (memory,) = [each for each in CHECKS if each.name == "memory"]
    variables = {**verify.environment(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    result = run_check(
        verify.command(memory),
        folder=tmp_path / "memory",
        limit_seconds=300.0,
        environment=variables,
    )

    assert result["outcome"] == "skipped"
    assert result["reason"] == "needs an NVIDIA GPU"
    assert result["tests"][0]["test"].startswith("test_gpu_memory.py::")


def test_a_part_that_runs_again_keeps_the_other_checks_of_the_same_machine(tmp_path: Path) -> None:
    def result(name: str, machine: Mapping[str, Any], date: str) -> dict[str, Any]:
        checks = {name: {**passed(), "date": date}}
        return {"part": 1, "seconds": 1.0, "machine": machine, "checks": checks}

    verify.write_result(tmp_path, result("one", MACHINE, "2026-12-01"))
    verify.write_result(tmp_path, result("two", MACHINE, "2026-12-02"))
    both = read_results(tmp_path)
    verify.write_result(tmp_path, result("three", {**MACHINE, "commit": "def"}, "2026-12-03"))

    dates = {name: check["date"] for name, check in both.items()}
    assert dates == {"one": "2026-12-01", "two": "2026-12-02"}
    assert set(read_results(tmp_path)) == {"three"}


def test_each_result_has_the_date_on_which_it_was_found() -> None:
    result = verify.run_part(
        1, [check("one"), check("two", num_gpus=2)], MACHINE, lambda *_: passed()
    )

    today = datetime.datetime.now(datetime.UTC).date()
    dates = [datetime.date.fromisoformat(each["date"]) for each in result["checks"].values()]
    assert all(datetime.timedelta(0) <= today - date <= datetime.timedelta(1) for date in dates)


def test_the_list_names_each_check_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    status = verify.main(["--list"])

    lines = capsys.readouterr().out.splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert status == 0
    assert sorted(named) == sorted(each.name for each in CHECKS)
    (ranks,) = [line for line in lines if line.startswith("  ranks ")]
    assert ranks.endswith("[2 GPUs]")


def test_a_machine_without_a_network_writes_only_into_a_folder_that_git_ignores() -> None:
    text = (verify.ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Verification on a GPU") : text.index("## Language")]

    names = r"(?:collect_wheels\.py |--target |--out |PYTHONPATH=\$PWD/)(\S+)"
    folders = re.findall(names, section)

    assert len(folders) >= 3
    assert all(folder.startswith(".build/") for folder in folders), folders


def result_of(**outcomes: str) -> dict[str, Any]:
    found = {}
    for name, outcome in outcomes.items():
        tests = [
            {"test": "x", "outcome": "passed", "figures": {"ratio": 1.01}},
            {"test": "y", "outcome": outcome, "message": "at /home/me\nAssertionError: 3"},
        ]
        is_run = outcome in ("passed", "failed")
        found[name.replace("_", "-")] = {
            "outcome": outcome,
            "date": "2026-12-01",
            **({"tests": tests, "output": "/home/me"} if is_run else {"reason": "no nvcc"}),
        }
    return {
        "part": 2,
        "seconds": 9.0,
        "machine": MACHINE,
        "checks": found,
    }


def test_a_table_says_not_yet_for_what_was_not_verified(tmp_path: Path) -> None:
    result = result_of(rebuild="passed", recovery="failed", rebuild_fused="skipped")
    (tmp_path / "part-2.json").write_text(json.dumps(result))

    table = full_table(read_results(tmp_path))
    row = {each.name: line for each, line in zip(CHECKS, table.splitlines()[2:], strict=True)}

    assert row["rebuild"].endswith("| NVIDIA H100, torch 2.11.0, 2026-12-01 |")
    assert "failed: 1 of 2 tests (NVIDIA H100" in row["recovery"]
    assert row["rebuild-fused"].endswith(f"| {NOT_YET}: no nvcc |")
    assert row["cost"].endswith(f"| {NOT_YET} |")


def test_a_subject_is_verified_only_as_far_as_all_its_checks_have_passed() -> None:
    names = ("cost", "short-steps", "separate-process", "offload")
    results = {name: {**passed(), "machine": MACHINE, "date": "d"} for name in names}

    table = subject_table(results)

    (hot_path,) = (check.shows for check in CHECKS if check.name == "hot-path")
    place = "NVIDIA H100, torch 2.11.0, d"
    assert f"| cost of monitoring | {place}; {NOT_YET}: {hot_path} |" in table
    assert f"| errors | {NOT_YET} |" in table


def test_a_published_result_has_figures_and_no_paths_of_the_machine() -> None:
    result = published(result_of(recovery="failed"))

    assert "/home/me" not in json.dumps(result)
    assert result["checks"]["recovery"]["tests"][0]["figures"] == {"ratio": 1.01}


def test_the_console_shows_failures_and_figures() -> None:
    text = console_table(result_of(recovery="failed", rebuild_fused="skipped"))

    assert "FAILED y: AssertionError: 3" in text
    assert '{"ratio": 1.01}' in text
    assert "no nvcc" in text


needs_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None or not checks.has_python_header(),
    reason="needs gcc and Python.h",
)


@needs_compiler
def test_the_extension_is_built_for_this_python(tmp_path: Path) -> None:
    built = verify.build_extension(tmp_path)
    assert built is not None
    loaded = importlib.util.spec_from_file_location("_hot_path", built)
    assert loaded is not None
    module = importlib.util.module_from_spec(loaded)

    assert hasattr(module, "RecordedFunction")


@needs_compiler
def test_the_extension_is_built_again_only_if_its_source_has_changed(tmp_path: Path) -> None:
    built = verify.build_extension(tmp_path)
    assert built is not None
    built.write_bytes(b"as it was")

    verify.build_extension(tmp_path)
    assert built.read_bytes() == b"as it was"

    os.utime(built, (0, 0))
    verify.build_extension(tmp_path)
    assert built.read_bytes() != b"as it was"


def test_an_old_extension_that_cannot_be_built_again_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / f"_hot_path{sysconfig.get_config_var('EXT_SUFFIX')}"
    old.write_bytes(b"as it was")
    os.utime(old, (0, 0))
    monkeypatch.setattr(verify, "has_python_header", lambda: False)

    assert verify.build_extension(tmp_path) is None

    assert not old.exists()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_have_the_table_of_the_last_results(document: str) -> None:
    text = (verify.ROOT / document).read_text()

    expected = with_table(text, DOCUMENTS[document](read_results(verify.RESULTS)))

    assert text == expected, "run tests/gpu/verify.py publish"


def test_help_texts_do_not_say_what_was_verified() -> None:
    """The tables of the documents do."""
    remarks = ("verified", "not yet", "not on CUDA")

    found = [spec.name for spec in CATALOG if any(word in spec.help for word in remarks)]

    assert found == []


def test_a_document_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places"):
        with_table("# Title\n", "| a |")
