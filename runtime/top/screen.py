"""Shows a run on the terminal, and reads it again at an interval. Needs the library textual."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.events import Resize
from textual.geometry import Size
from textual.widgets import Footer, Static

from ...errors import ZerowatchError
from ..common.plain_text import printable
from . import panels
from .run_source import RunSource
from .run_view import RunView

Draw = Callable[[RunView, int, int], Text]


class Panel(Static):
    """A part of the screen that is drawn again when the run or its size changes."""

    def __init__(self, name: str, draw: Draw) -> None:
        super().__init__(id=name, markup=False)
        self._draw_view = draw
        self._view: RunView | None = None
        self._text = ""

    def show(self, view: RunView) -> None:
        """Show a run."""
        self._view = view
        self.refresh(layout=True)

    def show_text(self, text: str) -> None:
        """Show a text until there is a run to show."""
        self._text = text
        self.refresh()

    def render(self) -> Text:
        """Draw the panel at its present size."""
        width, height = self.content_size
        if self._view is None or width < 1:
            return Text(self._text)
        return self._draw_view(self._view, width, height)


class TopScreen(App[None]):
    """The screen of `zerowatch top`.

    Args:
        source: The run.
        interval_seconds: Time between two readings.
        now: A clock that returns Unix seconds.
    """

    TITLE = "zerowatch top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort ranks"),
        Binding("space", "pause", "pause"),
        Binding("tab", "app.focus_next", "next list", show=True),
    ]
    CSS = """
    Screen { layout: vertical; }
    #header { height: 2; }
    #panels { layout: grid; grid-size: 2; grid-gutter: 0 1; height: 1fr; grid-rows: 6 3 2 1fr 4; }
    #panels > * { height: 100%; }
    #strip, #ranks, #alerts-box { column-span: 2; }
    #ranks-head { height: 2; }
    #ranks-list, #alerts-box { scrollbar-size-vertical: 1; height: 1fr; }
    #ranks-rows, #alerts { height: auto; }
    .-wide #panels { grid-size: 3; grid-rows: 7 4 1fr; grid-gutter: 0 3; }
    .-wide #alerts-box { column-span: 1; }
    .-tall #panels { grid-rows: 9 7 3 1fr 10; grid-gutter: 1 2; }
    .-wide.-tall #panels { grid-rows: 8 6 1fr; grid-gutter: 1 3; }
    """

    def __init__(
        self,
        source: RunSource,
        *,
        interval_seconds: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)  # the colors of the terminal, dark or light
        self.theme = "ansi-dark"
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]
        self._source, self._interval_seconds, self._now = source, interval_seconds, now
        self._view: RunView | None = None
        self._sort = "rank"
        self._is_paused = False
        self._stopped = threading.Event()

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Panel("header", self._draw_header)
        with Container(id="panels"):
            yield Panel("time", panels.time_panel)
            yield Panel("comm", panels.comm_panel)
            yield Panel("memory", panels.memory_panel)
            yield Panel("tuner", panels.tuner_panel)
            yield Panel("strip", panels.straggler_strip)
            with Container(id="ranks"):
                yield Panel(
                    "ranks-head", lambda view, width, _: panels.ranks_head(view, width, self._sort)
                )
                with VerticalScroll(id="ranks-list"):
                    yield Static(id="ranks-rows", markup=False)
            with VerticalScroll(id="alerts-box"):
                yield Static(id="alerts", markup=False)
        yield Footer(show_command_palette=False)

    def _draw_header(self, view: RunView, width: int, _: int) -> Text:
        return panels.header(view, width, self._now(), is_paused=self._is_paused)

    def on_mount(self) -> None:
        """Begin to read the run."""
        self.query_one("#header", Panel).show_text("reading the run ...")
        # A daemon thread, so that the program ends at once while a host does not answer.
        threading.Thread(target=self._read_on, name="zerowatch-top", daemon=True).start()

    def on_unmount(self) -> None:
        """Stop reading."""
        self._stopped.set()

    def on_resize(self) -> None:
        """Draw the lists for the new width, once the new layout is known."""
        self.call_after_refresh(self._draw_lists)

    def action_sort(self) -> None:
        """Sort the ranks by the next column."""
        names = list(panels.SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._draw()

    def action_pause(self) -> None:
        """Stop reading, or go on."""
        self._is_paused = not self._is_paused
        self.notify("paused" if self._is_paused else "reading again", timeout=2)
        self._draw()

    def _read_on(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            if not self._is_paused:
                try:
                    view = self._source.read()
                except (ZerowatchError, OSError, ValueError) as error:
                    # A folder may change while it is read, and a rank may answer anything.
                    self.call_from_thread(self._show_error, str(error))
                else:
                    self.call_from_thread(self._show, view)
            self._stopped.wait(max(0.1, began + self._interval_seconds - time.monotonic()))

    def _show(self, view: RunView) -> None:
        self._view = view
        self._draw()

    def _show_error(self, error: str) -> None:
        if self._view is None:
            self.query_one("#header", Panel).show_text(f"{printable(error)}; trying again")
        else:
            self.notify(printable(error), severity="error", markup=False)

    def _draw(self) -> None:
        if self._view is None:
            return
        size = self.size if self.is_headless else Size(*shutil.get_terminal_size(self.size))
        if size != self.size:
            # On a busy machine the signal of a new size was not seen once, for minutes.
            self.post_message(Resize(size, size))
        elif self.screen.outer_size != self.size:
            # textual 8 passes a new size to the screen by a timer of 8 ms. If the timer is late, as
            # on a busy machine, it is skipped, and all later sizes with it.
            self.screen.post_message(Resize(self.size, self.size))
        for panel in self.query(Panel):
            panel.show(self._view)
        self.call_after_refresh(self._draw_lists)

    def _draw_lists(self) -> None:
        """Draw what scrolls, which has the width of the part that is visible."""
        if self._view is None:
            return
        width = self.query_one("#ranks-list").scrollable_content_region.width
        rows = panels.ranks_rows(self._view, width, self._sort)
        self.query_one("#ranks-rows", Static).update(rows)
        width = self.query_one("#alerts-box").scrollable_content_region.width
        alerts = panels.alerts_panel(self._view, width, 1000)
        self.query_one("#alerts", Static).update(alerts)
