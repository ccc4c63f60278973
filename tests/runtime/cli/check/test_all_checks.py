"""Tests of the job that the environment describes, and of the result of all checks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerowatch.runtime.cli.check import all_checks, software
from zerowatch.runtime.cli.check.all_checks import (
    CHECKS,
    check_alone,
    exit_code,
    job_of_environment,
    merged,
)
from zerowatch.runtime.cli.check.verdicts import Finding, Runner, Verdict
from zerowatch.runtime.common import accelerator

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
OTHER_VARIABLES = ("LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in (*VARIABLES, *OTHER_VARIABLES) or name.startswith("ZEROWATCH_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({}, 3, (0, 0, 3, None)),
        ({"WORLD_SIZE": "8"}, None, (0, 0, 2, 8)),
        # A pod of Kubeflow's PyTorchJob, which starts the ranks: 8 may be the number of pods
        ({"RANK": "1", "WORLD_SIZE": "8"}, None, (0, 0, 2, None)),
        ({"LOCAL_RANK": "1"}, None, (0, 0, 2, None)),
        (dict(zip(VARIABLES, ("5", "1", "8", "4"), strict=True)), None, (5, 1, 4, 8)),
        (dict(zip(VARIABLES, ("5", "1", "8", "4"), strict=True)), 2, (5, 1, 2, 8)),
        # DeepSpeed's launcher
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"},
            None,
            (5, 1, 4, 8),
        ),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, None, (5, 1, 1, 8)),
    ],
)
def test_the_job_is_that_of_the_launchers_variables(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    given: int | None,
    expected: tuple[int | None, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerator, "current", SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(all_checks, "driver_answers", lambda: True)

    job = job_of_environment(None, given)

    assert (job.rank, job.local_rank, job.local_ranks, job.world_size) == expected
    assert job.has_other_ranks == all_checks.is_rank(variables)
    names_their_number = {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & variables.keys()
    assert job.local_ranks_given == (given is not None or bool(names_their_number))


def test_a_driver_that_does_not_answer_is_one_failure_and_is_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accelerator, "current", SimpleNamespace())  # has no function to call
    monkeypatch.setattr(software, "nvml_inventory", None)
    monkeypatch.setattr(all_checks, "driver_answers", lambda: False)

    findings = check_alone(job_of_environment(None, None), Runner())

    unchecked = {"NVML", "allocator", "compiler", "ds config", "speed"}
    of_driver = [each for each in findings if "the driver of the GPUs" in each.text]
    assert {each.check for each in of_driver} == {"accelerator", *unchecked}
    assert [each.check for each in of_driver if each.verdict == Verdict.FAILED] == ["accelerator"]
    assert not [each.text for each in findings if "could not be checked" in each.text]


def test_the_settings_are_those_of_the_ds_config_and_its_faults_are_left_to_its_check(
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"zerowatch": {"serve": {"port": 9999}}}))
    bad.write_text(json.dumps({"zerowatch": {"serve": {"prot": 9999}}}))

    jobs = [job_of_environment(str(path), 1) for path in (good, bad)]

    assert [(job.settings.serve.port, job.settings_error) for job in jobs] == [
        (9999, None),
        (9464, None),
    ]


def test_a_wrong_variable_is_an_error_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROWATCH_SERVE_PORT", "many")

    job = job_of_environment(None, 1)

    assert (job.settings_error or "").startswith("setting 'serve.port' (environment)")
    assert job.settings.serve.port == 9464


def finding(verdict: Verdict, check: str = "ports", where: str = "") -> Finding:
    return Finding(verdict=verdict, text="text", check=check, where=where)


@pytest.mark.parametrize(
    ("verdicts", "usual", "strict"),
    [
        ((), 0, 0),
        ((Verdict.OK, Verdict.NOT_APPLICABLE), 0, 0),
        ((Verdict.OK, Verdict.WARNING), 0, 1),
        ((Verdict.FAILED, Verdict.OK), 1, 1),
    ],
)
def test_the_exit_code_is_1_from_the_least_verdict_on(
    verdicts: tuple[Verdict, ...], usual: int, strict: int
) -> None:
    findings = [finding(verdict) for verdict in verdicts]

    assert exit_code(findings, strict=False) == usual
    assert exit_code(findings, strict=True) == strict


@pytest.mark.parametrize(
    ("places", "shown"),
    [("ab", "a, b"), ("abc", "a, b, c"), ("aab", "a, b"), ("abcde", "a, b, c and 2 more")],
)
def test_joined_findings_name_three_places(places: str, shown: str) -> None:
    [row] = merged([finding(Verdict.OK, where=place) for place in places])

    assert row.where == shown


def test_findings_are_in_the_order_of_the_checks_and_differ_by_verdict() -> None:
    names = [check.name for check in CHECKS]
    given = [finding(Verdict.OK, "links"), *(finding(Verdict.OK, name) for name in names[::-1])]

    rows = merged([*given, finding(Verdict.WARNING, names[0])])

    assert [row.check for row in rows] == [names[0], *names, "links"]


def test_only_the_speed_is_checked_by_each_rank() -> None:
    assert [check.name for check in CHECKS if check.each_rank] == ["speed"]
