"""Tests of the table and the JSON of the checks."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from zerowatch.runtime.cli.check.output import as_json, print_findings
from zerowatch.runtime.cli.check.verdicts import Finding, Verdict, failed, ok, skipped, warning

FINDINGS = [
    Finding(verdict=Verdict.OK, text="torch 2.9", check="versions", where="a"),
    Finding(verdict=Verdict.FAILED, text="no g++", advice="install it", check="compiler"),
    Finding(verdict=Verdict.WARNING, text="slow", advice="wait", check="compiler", where="a"),
]


def printed(findings: list[Finding]) -> str:
    stream = io.StringIO()
    print_findings(findings, "zerowatch check: here", stream)
    return stream.getvalue()


def test_the_table_names_each_check_once_and_counts_the_verdicts() -> None:
    assert printed(FINDINGS) == (
        "zerowatch check: here\n"
        "\n"
        "verdict  check     finding\n"
        "ok       versions  torch 2.9\n"
        "failed   compiler  no g++\n"
        "                   to do: install it\n"
        "warning            slow\n"
        "                   to do: wait\n"
        "\n"
        "1 failed, 1 warning, 1 ok, 0 not applicable\n"
    )


def test_the_places_are_shown_if_there_are_several() -> None:
    elsewhere = Finding(verdict=Verdict.WARNING, text="late", check="clocks", where="b")

    lines = printed([*FINDINGS, elsewhere]).splitlines()

    assert lines[2].split() == ["verdict", "check", "where", "finding"]
    assert lines[-3].split() == ["warning", "clocks", "b", "late"]
    assert lines[-1] == "1 failed, 2 warnings, 1 ok, 0 not applicable"


def test_outside_of_a_terminal_paths_and_advice_stay_on_one_line() -> None:
    path = "/home/me/.cache/torch_extensions/py311_cu130/deepspeed_shm_comm/lock-of-a-long-name"
    advice = f"if no job of another machine compiles there: rm {path}"
    found = Finding(
        verdict=Verdict.FAILED, text=f"stale {path}, 3 h old", advice=advice, check="builds"
    )

    lines = printed([found]).splitlines()

    assert lines[3:6] == [
        "failed   builds  stale",
        f"                 {path},",
        "                 3 h old",
    ]
    assert lines[6] == f"                 to do: {advice}"


def test_a_long_text_is_folded_to_the_width_of_the_table() -> None:
    found = [replace(each, text="word " * 60, advice="") for each in FINDINGS]

    widths = [len(line) for line in printed(found).splitlines()]

    assert 98 - len("word ") < max(widths) <= 98


@pytest.mark.parametrize(
    ("findings", "verdict"), [([], "ok"), (FINDINGS, "failed"), (FINDINGS[::2], "warning")]
)
def test_the_json_has_the_worst_verdict_and_all_fields(
    findings: list[Finding], verdict: str
) -> None:
    content = json.loads(as_json(findings, "title", 3))

    assert (content["title"], content["verdict"], content["exit_code"]) == ("title", verdict, 3)
    assert content["findings"] == [
        {
            "verdict": each.verdict.value,
            "text": each.text,
            "advice": each.advice,
            "figures": {},
            "check": each.check,
            "where": each.where,
        }
        for each in findings
    ]


def test_each_kind_of_finding_has_its_verdict_and_figures() -> None:
    made = [ok("a", x=1.0), skipped("b"), warning("c", "d", y=2.0), failed("e", "f", z=3.0)]

    assert made == [
        Finding(verdict=Verdict.OK, text="a", figures={"x": 1.0}),
        Finding(verdict=Verdict.NOT_APPLICABLE, text="b"),
        Finding(verdict=Verdict.WARNING, text="c", advice="d", figures={"y": 2.0}),
        Finding(verdict=Verdict.FAILED, text="e", advice="f", figures={"z": 3.0}),
    ]
