"""Tests of the screen at several sizes and of its panels, without a terminal.

Covers `screen.py`, `panels.py` and `run_view.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import write_run
from rich.console import Console
from rich.text import Text
from served_ranks import two_ranks
from textual.pilot import Pilot

from zerowatch.runtime.top import panels
from zerowatch.runtime.top.http_client import Access, HttpClient, NoAnswerError
from zerowatch.runtime.top.run_source import RunFolder, ServedRun
from zerowatch.runtime.top.run_view import (
    AlertView,
    MemoryView,
    RankView,
    RunView,
    Share,
    TunerView,
)
from zerowatch.runtime.top.screen import TopScreen

SIZES = [(80, 24), (100, 50), (200, 24), (200, 50)]
PATIENCE_SECONDS = 60.0


class FixedRun:
    """A run that is always the same, or that has an error first."""

    def __init__(self, *views: RunView | Exception) -> None:
        self.views = list(views)

    def read(self) -> RunView:
        view = self.views[0] if len(self.views) == 1 else self.views.pop(0)
        if isinstance(view, Exception):
            raise view
        return view


@pytest.fixture(scope="module")
def live() -> Iterator[RunView]:
    with two_ranks(second_answers=False) as ranks:
        yield ServedRun(ranks[0].targets_url, HttpClient(Access()).get).read()


@pytest.fixture
def recorded(tmp_path: Path) -> RunView:
    return RunFolder(write_run(tmp_path / "night", steps=40), HttpClient(Access()).get).read()


def shown_by(app: TopScreen) -> list[str]:
    """The lines of the screen."""
    size = app.size
    console = Console(width=size.width, height=size.height, file=None, color_system=None)
    with console.capture() as captured:
        console.print(app.screen._compositor.render_update(full=True))
    return captured.get().split("\n")


def on_screen(
    run: FixedRun,
    size: tuple[int, int],
    body: Callable[[TopScreen, Pilot[None]], Awaitable[None]],
) -> None:
    """Run a body on a screen of a size."""

    async def play() -> None:
        app = TopScreen(run, interval_seconds=1.0)
        async with app.run_test(size=size) as pilot:
            await body(app, pilot)

    asyncio.run(play())


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition."""
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"timed out {what}")


def texts(app: TopScreen) -> str:
    return "\n".join(shown_by(app))


@pytest.mark.parametrize("size", SIZES)
def test_all_parts_are_visible_at_each_size(live: RunView, size: tuple[int, int]) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        for part in (
            "night-7", "training", "steps 20", "backward", "60.0%", "exposed    20.0%",
            "imbalance", "cpu rank 0", "risk 2%", "observe", "Stragglers", "2 ranks, 1 silent",
            "refused", "does not answer", "q quit",
        ):  # fmt: skip
            await until(pilot, lambda part=part: part in texts(app), part)

    on_screen(FixedRun(live), size, body)


@pytest.mark.parametrize("size", SIZES)
def test_a_finished_run_shows_its_verdict_and_its_ranks(
    recorded: RunView, size: tuple[int, int]
) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        parts = ("Nothing holds this run back", "completed", "ended 2026", "whole run", "backward")
        for part in (*parts, "60.0%", "steps 40"):
            await until(pilot, lambda part=part: part in texts(app), part)

    on_screen(FixedRun(recorded), size, body)


def test_the_layout_follows_the_size_of_the_terminal(live: RunView) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "steps 20" in texts(app))
        narrow = next(line for line in shown_by(app) if "Where the time goes" in line)
        assert "Memory" not in narrow

        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: "Memory" in shown_by(app)[2])
        assert "Where the time goes" in shown_by(app)[2]
        await until(pilot, lambda: "node-0" in texts(app))

    on_screen(FixedRun(live), (80, 24), body)


def test_a_new_size_is_shown_although_a_busy_machine_skips_the_timer_of_textual(
    live: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "steps 20" in texts(app))
        monkeypatch.setattr(app, "set_timer", partial(app.set_timer, pause=True))

        await pilot.resize_terminal(200, 50)
        await until(pilot, lambda: "node-0" in texts(app))

    on_screen(FixedRun(live), (80, 24), body)


def test_a_new_size_is_shown_although_its_signal_was_not_seen(
    live: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "steps 20" in texts(app))

        monkeypatch.setattr(TopScreen, "is_headless", False)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("LINES", "50")
        await until(pilot, lambda: "node-0" in texts(app))

        assert app.size == (200, 50)
        monkeypatch.undo()

    on_screen(FixedRun(live), (80, 24), body)


def test_ranks_are_sorted_by_the_key_s(live: RunView) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "sorted by rank" in texts(app))
        await pilot.press("s")
        await until(pilot, lambda: "sorted by slow in" in texts(app))

    on_screen(FixedRun(live), (80, 24), body)


def test_a_paused_screen_is_marked_until_it_reads_again(live: RunView) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "night-7" in texts(app))
        await pilot.press("space")
        await until(pilot, lambda: "| paused at " in texts(app))
        await pilot.press("space")
        await until(pilot, lambda: "paused at " not in texts(app))

    on_screen(FixedRun(live), (80, 24), body)


def test_q_quits(live: RunView) -> None:
    ended = []

    async def play() -> None:
        app = TopScreen(FixedRun(live), interval_seconds=1.0)
        async with app.run_test() as pilot:
            await pilot.press("q")
        ended.append(app.return_code)

    asyncio.run(play())

    assert ended == [0]


@pytest.mark.parametrize(
    "error",
    [
        NoAnswerError("http://a:1/targets: refused"),
        FileNotFoundError(2, "refused"),
        ValueError("refused"),
    ],
)
def test_an_error_is_shown_until_the_run_can_be_read(live: RunView, error: Exception) -> None:
    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "refused; trying again" in texts(app))
        await until(pilot, lambda: "steps 20" in texts(app))

    on_screen(FixedRun(error, live), (80, 24), body)


def test_lines_are_never_wider_than_the_panel(live: RunView) -> None:
    for width in (20, 39, 60, 79, 130):
        for draw in (
            panels.time_panel, panels.comm_panel, panels.memory_panel, panels.tuner_panel,
            panels.alerts_panel,
        ):  # fmt: skip
            for line in draw(live, width, 30).split("\n"):
                assert line.cell_len <= width, (draw.__name__, line.plain)
        for text in (
            panels.header(live, width, live.at),
            panels.straggler_strip(live, width, 2),
            panels.ranks_rows(live, width, "rank"),
        ):
            assert all(line.cell_len <= width for line in text.split("\n"))


def test_a_panel_that_is_too_low_says_how_many_lines_are_hidden(live: RunView) -> None:
    text = panels.comm_panel(live, 60, 3).plain.split("\n")

    assert len(text) == 3
    assert text[-1] == "… 4 more lines"


def test_the_strip_has_a_character_for_each_rank() -> None:
    ranks = [
        RankView(rank=0, node="", state="running", straggler_score=0.0),
        RankView(rank=1, node="", state="running", straggler_score=0.07, straggler_phase="data"),
        RankView(rank=2, node="", state="no answer"),
        RankView(rank=3, node="", state="running"),
        RankView(rank=4, node="", state="running", straggler_score=0.5, straggler_phase="forward"),
    ]
    text = panels.straggler_strip(view_of(ranks), 100, 2).plain

    assert "▁▆x-█  rank 4: +50% in forward; rank 1: +7% in data" in text


@pytest.mark.parametrize("size", [(80, 24), (80, 40), (120, 30), (200, 50)])
def test_of_many_ranks_the_strip_shows_all_and_names_the_straggler(size: tuple[int, int]) -> None:
    ranks = [
        RankView(
            rank=rank,
            node="",
            state="running",
            straggler_score=0.4 if rank == 206 else 0.0,
            straggler_phase="backward",
        )
        for rank in range(256)
    ]

    async def body(app: TopScreen, pilot: Pilot[None]) -> None:
        for part in ("rank 206: +40% in backward", "█", "Stragglers"):
            await until(pilot, lambda part=part: part in texts(app), part)

    on_screen(FixedRun(view_of(ranks)), size, body)


@pytest.mark.parametrize(
    ("num_ranks", "height", "per_character"), [(40, 2, 1), (41, 2, 2), (80, 3, 1), (1024, 3, 13)]
)
def test_without_room_for_a_character_each_the_worst_of_some_ranks_is_shown(
    num_ranks: int, height: int, per_character: int
) -> None:
    ranks = [RankView(rank=rank, node="", state="running") for rank in range(num_ranks)]
    ranks[-1] = replace(ranks[-1], straggler_score=0.5, straggler_phase="data")
    ranks[0] = replace(ranks[0], state="no answer")

    title, *strip = panels.straggler_strip(view_of(ranks), 40, height).plain.split("\n")

    cells = "".join(strip).partition("  ")[0]
    assert len(strip) == height - 1
    assert cells == "x" + "-" * (-(-num_ranks // per_character) - 2) + "█"
    assert f"rank {num_ranks - 1}: +50%" in f"{title} {strip}"
    assert ("ranks p" in title) == (per_character > 1) or "…" in title


def test_ranks_that_do_not_answer_come_first_in_all_orders_but_their_number() -> None:
    ranks = [
        RankView(rank=0, node="a", state="running", steps=5, exposed_ratio=0.5),
        RankView(rank=1, node="b", state="no answer", note="timed out", age_seconds=12.0),
    ]
    by_exposed = panels.ranks_rows(view_of(ranks), 80, "exposed").plain.split("\n")
    by_rank = panels.ranks_rows(view_of(ranks), 80, "rank").plain.split("\n")

    assert by_exposed[0].split()[:5] == ["1", "no", "answer", "for", "12"]
    assert by_rank[0].split()[:2] == ["0", "5"]


def test_texts_of_a_run_send_no_codes_to_the_terminal(live: RunView) -> None:
    evil = "\x1b]0;title\x07[bold]\u202e"
    view = replace(
        live,
        run_id=evil,
        source=evil,
        verdict=evil,
        notes=[evil],
        alerts=[AlertView(severity="info", name=evil, text=evil)],
        ranks=[RankView(rank=0, node=evil, state="no answer", note=evil)],
    )
    drawn = (
        panels.header(view, 200, view.at),
        panels.alerts_panel(view, 200, 50),
        panels.ranks_rows(view, 200, "rank"),
    )

    assert all(line.plain.isprintable() for text in drawn for line in text.split("\n"))
    assert "[bold]" in drawn[1].plain


def view_of(ranks: list[RankView]) -> RunView:
    return RunView(
        run_id="run", status="training", source="", is_live=True, at=0.0, period="last 60 s",
        facts=[], phases=[], exposed=None, causes=[], memory=[], ranks=ranks, alerts=[],
        alerts_source="", tuner=TunerView(), straggler_threshold=0.05,
    )  # fmt: skip


FULL = RunView(
    run_id="night-7",
    status="training",
    source="http://a:1/targets",
    is_live=True,
    at=1_790_000_000.0,
    period="last 60 s",
    facts=[("steps", "1,234"), ("step p50", "412 ms"), ("loss", "2.5")],
    phases=[
        Share(name="data", ratio=0.0625, seconds_per_step=0.0256),
        Share(name="backward", ratio=0.6, seconds_per_step=1.25),
        Share(name="other", ratio=1.0, seconds_per_step=None),
    ],
    exposed=Share(name="exposed", ratio=0.3, seconds_per_step=0.125),
    causes=[
        Share(name="imbalance", ratio=0.2, seconds_per_step=0.08),
        Share(name="latency", ratio=0.05, seconds_per_step=0.02),
        Share(name="redundancy", ratio=0.03, seconds_per_step=0.01),
        Share(name="bandwidth", ratio=0.015, seconds_per_step=0.006),
        Share(name="unknown", ratio=0.005, seconds_per_step=0.002),
    ],
    memory=[
        MemoryView(
            device="cuda:0 rank 3",
            peak_bytes=6 * 2**30,
            limit_bytes=8 * 2**30,
            predicted_bytes=7 * 2**30,
            risk_ratio=0.6,
            categories={"activations": 3 * 2**30, "baseline": 2**30},
        ),
        MemoryView(
            device="cpu rank 0",
            peak_bytes=None,
            limit_bytes=4 * 2**30,
            predicted_bytes=None,
            risk_ratio=None,
            categories={},
        ),
    ],
    ranks=[
        RankView(
            rank=0,
            node="node-0",
            state="running",
            steps=1234,
            step_seconds=0.412,
            exposed_ratio=0.2,
            wait_ratio=0.11,
            data_ratio=0.07,
            memory_ratio=0.92,
            risk_ratio=0.5,
            utilization_ratio=0.8,
            mfu_ratio=0.35,
            straggler_score=0.05,
            straggler_phase="data",
        ),
        RankView(
            rank=1,
            node="a-node-with-a-long-name",
            state="running",
            steps=1233,
            step_seconds=130.0,
            exposed_ratio=0.21,
            memory_ratio=0.93,
            risk_ratio=0.51,
            straggler_score=0.06,
            straggler_phase="backward",
        ),
        RankView(rank=2, node="node-2", state="no answer", note="refused", age_seconds=130.0),
        RankView(rank=3, node="node-3", state="ended"),
    ],
    alerts=[
        AlertView(severity="critical", name="ZerowatchRankHung", text="rank 1 hangs"),
        AlertView(severity="info", name="Other", text="a note", is_pending=True),
    ],
    alerts_source="Prometheus",
    tuner=TunerView(
        state="trial",
        symptoms={"comm_bandwidth": 0.3, "data_bound": 0.2},
        knobs={"reduce_bucket_size": "5e+08 (+7%)"},
        decisions=["decisions: 2 accepted"],
    ),
    straggler_threshold=0.05,
    notes=["other runs"],
)

EXPECTED = Path(__file__).parent / "expected"


def test_the_panels_show_all_figures_in_their_colors() -> None:
    drawn = {
        "header": panels.header(FULL, 100, FULL.at + 9),
        "paused header": panels.header(FULL, 100, FULL.at, is_paused=True),
        "time": panels.time_panel(FULL, 60, 10),
        "low time": panels.time_panel(FULL, 60, 3),
        "communication": panels.comm_panel(FULL, 60, 10),
        "narrow communication": panels.comm_panel(FULL, 59, 10),
        "memory": panels.memory_panel(FULL, 60, 10),
        "low memory": panels.memory_panel(FULL, 60, 4),
        "tuner": panels.tuner_panel(FULL, 60, 10),
        "low tuner": panels.tuner_panel(FULL, 60, 4),
        "stragglers": panels.straggler_strip(FULL, 100, 3),
        "narrow stragglers": panels.straggler_strip(FULL, 20, 3),
        "alerts": panels.alerts_panel(FULL, 60, 20),
        "names of columns": panels.ranks_head(FULL, 110, "slow in"),
        "ranks by score": panels.ranks_rows(FULL, 110, "slow in"),
        "ranks by step": panels.ranks_rows(FULL, 98, "step"),
        "ranks by memory": panels.ranks_rows(FULL, 82, "mem"),
        "narrow ranks": panels.ranks_rows(FULL, 40, "rank"),
    }

    text = "".join(f"{name}:\n{panel.markup}\n\n" for name, panel in drawn.items())

    assert text == (EXPECTED / "panels.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "age", "words"),
    [
        ({}, 9.9, "| live |"),
        ({}, 10.0, "| live, 10 s ago |"),
        ({}, 119.0, "| live, 119 s ago |"),
        ({}, 120.0, "| live, 2 min ago |"),
        ({}, 7200.0, "| live, 2 h ago |"),
        ({}, 172_800.0, "| live, 2 d ago |"),
        ({"is_live": False, "status": "running"}, 45.0, "| log, last step 45 s ago |"),
        ({"is_live": False, "status": "killed"}, 45.0, "| ended 2026-09-21 14:13 UTC |"),
        ({"ranks": FULL.ranks[3:]}, 45.0, " 1 rank | last values |"),
    ],
)
def test_the_header_says_how_old_the_figures_are(
    changes: dict[str, Any], age: float, words: str
) -> None:
    view = replace(FULL, **changes)

    assert words in panels.header(view, 200, view.at + age).plain


def test_facts_that_do_not_fit_are_left_out() -> None:
    facts = panels.header(FULL, 29, FULL.at).plain.split("\n")[1]

    assert facts == " steps 1,234 step p50 412 ms"
    assert panels.header(FULL, 27, FULL.at).plain.split("\n")[1] == " steps 1,234"


EMPTY = replace(
    FULL, phases=[], exposed=None, causes=[], memory=[], ranks=[], alerts=[], notes=[],
    tuner=TunerView(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("draw", "live", "recorded"),
    [
        (panels.time_panel, "no step yet", "no step yet"),
        (panels.comm_panel, "not known yet", "not recorded"),
        (panels.memory_panel, "no readings", "no readings"),
        (panels.tuner_panel, "no tuner", "nothing recorded"),
        (panels.alerts_panel, "none", "none"),
    ],
)
def test_a_panel_without_figures_says_so(
    draw: Callable[[RunView, int, int], Text], live: str, recorded: str
) -> None:
    last = [
        draw(replace(EMPTY, is_live=is_live), 60, 5).plain.split("\n")[-1]
        for is_live in (True, False)
    ]

    assert last == [live, recorded]


@pytest.mark.parametrize(
    ("is_live", "ratio", "words"),
    [
        (True, 0.0006, ["causes are not known yet"]),
        (False, 0.0006, ["causes: not recorded"]),
        (True, 0.0004, []),
    ],
)
def test_without_causes_the_panel_of_communication_says_so(
    is_live: bool, ratio: float, words: list[str]
) -> None:
    exposed = Share(name="exposed", ratio=ratio, seconds_per_step=None)

    panel = panels.comm_panel(replace(EMPTY, is_live=is_live, exposed=exposed), 60, 5)

    assert panel.plain.split("\n")[2:] == words


@pytest.mark.parametrize(
    ("risk", "style"),
    [(0.5, panels.GOOD), (0.51, panels.WARN), (0.8, panels.WARN), (0.81, panels.BAD)],
)
def test_the_color_of_a_risk_is_that_of_its_alert(risk: float, style: str) -> None:
    row = replace(FULL.memory[0], risk_ratio=risk)

    [line] = [
        span for span in panels.memory_panel(replace(FULL, memory=[row]), 20, 9).spans
        if span.start > 10 and span.style in (panels.GOOD, panels.WARN, panels.BAD)
    ][:1]  # fmt: skip

    assert line.style == style


@pytest.mark.parametrize(
    ("score", "character"),
    [(-0.1, "▁"), (0.012, "▁"), (0.0126, "▂"), (0.05, "▅"), (0.0999, "█"), (0.5, "█")],
)
def test_the_height_of_a_character_is_the_score_over_twice_the_limit(
    score: float, character: str
) -> None:
    ranks = [RankView(rank=0, node="", state="running", straggler_score=score)]

    assert panels.straggler_strip(view_of(ranks), 100, 2).plain.split("\n")[1][0] == character
