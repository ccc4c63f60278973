"""`zerowatch top` beside a real job: its figures are those of /metrics, then of the report."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from fakes.scraper import eventually
from scripts.launching import TIMEOUT_SECONDS, ZEROWATCH, environment

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.reports.run_summary import summary_of
from zerowatch.runtime.top.http_client import Access, HttpClient
from zerowatch.runtime.top.run_source import open_source
from zerowatch.runtime.top.run_view import RunView

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

STEPS = 30


def test_a_job_is_shown_while_it_trains_and_after_its_end(tmp_path: Path) -> None:
    variables = {"ZEROWATCH_RUN_ID": "seen", "ZEROWATCH_SERVE_PORT": "0"}
    client = HttpClient(Access())
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [ZEROWATCH, "demo", "--steps", str(STEPS)],
            cwd=tmp_path,
            env=environment(**variables),
            stdout=output,
            stderr=output,
        )
        views: list[RunView] = []

        def trains() -> bool:
            try:
                source = open_source(None, runs=tmp_path / "runs", get=client.get)
                views.append(source.read())
            except ZerowatchError:  # no run yet
                return False
            ranks = views[-1].ranks
            return len(ranks) == 2 and all(rank.exposed_ratio is not None for rank in ranks)

        try:
            assert eventually(trains, TIMEOUT_SECONDS, 0.5)
            live = views[-1]
        finally:
            job.wait(TIMEOUT_SECONDS)

    assert live.is_live and live.status == "training"
    assert [rank.state for rank in live.ranks] == ["running", "running"]
    phases = {share.name: share.ratio for share in live.phases}
    assert sum(phases.values()) == pytest.approx(1, abs=0.01)
    assert live.exposed is not None
    assert sum(cause.ratio for cause in live.causes) == pytest.approx(live.exposed.ratio, rel=0.01)

    summary = summary_of(tmp_path / "runs" / "seen")
    ended = open_source(str(tmp_path / "runs" / "seen"), runs=tmp_path, get=client.get).read()
    assert ended.status == "completed"
    assert ended.exposed is not None
    assert ended.exposed.ratio == summary.figures["comm_exposed_ratio"]
    assert [rank.steps for rank in ended.ranks] == [STEPS, STEPS]
