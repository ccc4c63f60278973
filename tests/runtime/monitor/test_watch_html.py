"""Tests of `watch_html.py`: what a notebook shows of a watch."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import zerowatch
from zerowatch.metrics.catalog import communication, memory, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.monitor.watch import NullWatch
from zerowatch.runtime.monitor.watch_html import watch_html

NOW = 1_000_000.0
GIB = 2**30


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder()
    recorder.add(training.STEPS, 1200)
    recorder.set(training.LAST_STEP_TIMESTAMP, NOW - 3)
    recorder.set(training.LOSS, 2.34567)
    recorder.add(training.TOKENS, 80_000)
    for phase, seconds in (("forward", 20.0), ("backward", 55.0), ("optimizer", 5.0)):
        recorder.add(training.PHASE_SECONDS, seconds, phase)
    recorder.add(training.PHASE_SECONDS, 20.0, "eval")
    recorder.set(training.STEP_DURATION_QUANTILE, 0.25, "0.5")
    recorder.set(communication.COMM_COVERAGE_RATIO, 1.0)
    recorder.add(communication.COMM_EXPOSED_SECONDS, 8.0, "dp")
    recorder.set(memory.MEMORY_PEAK, 6.0 * GIB, "cuda:0", "allocated")
    recorder.set(memory.MEMORY_LIMIT, 8.0 * GIB, "cuda:0")
    recorder.set(memory.OOM_RISK, 0.75, "cuda:0")
    return recorder


def shown(
    recorder: Recorder, *, page_url: str | None = "http://127.0.0.1:9464/", is_open: bool = True
) -> str:
    return watch_html(
        recorder.snapshot(),
        run_id="20261123T000000-abcdef",
        is_open=is_open,
        page_url=page_url,
        folder=Path("runs/20261123T000000-abcdef"),
        now=NOW,
    )


def text_of(html: str) -> str:
    """Return the text, which requires that the HTML is well-formed."""
    plain = html.replace("&middot;", "").replace("&nbsp;", "")
    return " ".join("".join(ElementTree.fromstring(plain).itertext()).split())


def test_it_shows_state_step_throughput_phases_communication_and_memory(recorder: Recorder) -> None:
    text = text_of(shown(recorder))

    assert "training" in text
    assert "1,200, the last 3 s ago" in text
    assert "2.3457" in text
    assert "250 ms" in text
    assert "1,000 on this rank" in text  # 80,000 tokens in 80 s without evaluation
    assert "10.0% of training time" in text
    assert "6.00 GiB of 8.00 GiB, out-of-memory risk 75% (high)" in text
    assert "backward 55.0%" in text


def test_it_links_to_the_live_page_while_the_watch_is_open(recorder: Recorder) -> None:
    link = 'href="http://127.0.0.1:9464/"'

    assert link in shown(recorder)
    assert link not in shown(recorder, is_open=False)
    assert "href" not in shown(recorder, page_url=None)


def test_exposed_communication_is_not_shown_if_some_collectives_are_not_timed(
    recorder: Recorder,
) -> None:
    recorder.set(communication.COMM_COVERAGE_RATIO, 0.5)

    text = text_of(shown(recorder))

    assert "not known: 50% of the collectives are timed" in text
    assert "10.0%" not in text


def test_before_the_first_step_nothing_is_invented() -> None:
    text = text_of(shown(Recorder()))

    assert "before the first step" in text
    assert "loss" not in text
    assert "memory" not in text


def test_a_run_that_has_ended_shows_the_reason(recorder: Recorder) -> None:
    recorder.set_info(training.RUN_END_INFO, "completed")

    assert "ended (completed)" in text_of(shown(recorder, is_open=False))


def test_the_text_of_a_run_cannot_add_html(recorder: Recorder) -> None:
    html = watch_html(
        recorder.snapshot(),
        run_id="<script>",
        is_open=True,
        page_url='http://h/"><script>',
        folder=Path("<script>"),
        now=NOW,
    )

    assert "<script>" not in html


def test_a_watch_shows_itself_in_a_notebook() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quiet = {"serve": {"enabled": False}, "run_log": {"enabled": False}}
    watch = zerowatch.watch(model, optimizer, quiet)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    watch.close()

    text = text_of(watch._repr_html_())

    assert "ended" in text
    assert "steps1" in text.replace(" ", "")
    assert f"{watch.run_id}: ended (completed), 1 step, loss " in repr(watch)
    assert "off" in NullWatch()._repr_html_() and "off" in repr(NullWatch())
