"""A check is bounded in time, and its errors stop no other check."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from zerowatch.runtime.cli.check.verdicts import Check, Finding, Job, Runner, Verdict, ok


def test_a_check_that_hangs_fails_after_its_limit_with_what_it_has_found() -> None:
    released = threading.Event()

    def hang(job: Job) -> Iterator[Finding]:
        yield ok("the first half")
        released.wait()

    runner = Runner()
    first, second = runner.run(Check(name="disk", limit_seconds=0.2, run=hang), Job())
    released.set()

    assert (first.text, first.verdict) == ("the first half", Verdict.OK)
    assert (second.check, second.verdict) == ("disk", Verdict.FAILED)
    assert "not done after 0.2 s" in second.text
    assert runner.hung == ["disk"]


def test_an_error_of_a_check_is_a_finding() -> None:
    def fail(job: Job) -> Iterator[Finding]:
        yield from ()
        raise ImportError("libfoo.so.1: cannot open shared object file")

    (finding,) = Runner().run(Check(name="accelerator", limit_seconds=60, run=fail), Job())

    assert finding.verdict is Verdict.FAILED
    assert "ImportError: libfoo.so.1" in finding.text
