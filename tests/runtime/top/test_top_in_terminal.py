"""Tests of `zerowatch top` in a real terminal: tmux shows an active run and a finished one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.scraper import eventually
from recorded_runs import write_run
from require import program
from served_ranks import two_ranks

pytestmark = pytest.mark.slow

NARROW, WIDE = (80, 24), (200, 50)
ZEROWATCH = Path(sys.executable).with_name("zerowatch")


class Terminal:
    """A terminal of tmux with a server of its own, in which a command runs."""

    def __init__(self, folder: Path, size: tuple[int, int], *command: object) -> None:
        self._tmux = [program("tmux", apt="tmux"), "-S", str(folder / "socket"), "-f", "/dev/null"]
        # With COLUMNS or LINES set, a program does not ask the terminal for its size.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        environment = {**inherited, "LANG": "C.UTF-8", "TERM": "screen-256color"}
        width, height = map(str, size)
        shell = f"{' '.join(map(str, command))}; echo exit $?; exec sleep 600"
        self._call(
            "new-session", "-d", "-x", width, "-y", height, "-c", str(folder), shell,
            environment=environment,
        )  # fmt: skip

    def _call(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        command = [*self._tmux, *arguments]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment, timeout=60
        )
        return done.stdout

    def shown(self, *, codes: bool = False) -> str:
        """The text on the screen; with its control codes on demand."""
        return self._call("capture-pane", "-p", *(["-e"] if codes else []))

    def send(self, key: str) -> None:
        """Press a key."""
        self._call("send-keys", key)

    def resize(self, size: tuple[int, int]) -> None:
        """Change the size of the terminal."""
        width, height = map(str, size)
        self._call("resize-window", "-x", width, "-y", height)

    def waits_for(self, *parts: str) -> str:
        """Wait until all parts are on the screen, and return that screen."""
        return self.waits_until(lambda screen: all(part in screen for part in parts))

    def waits_until(self, condition: Callable[[str], bool]) -> str:
        """Wait until a condition of the screen holds, and return that screen."""
        screens: list[str] = []

        def holds() -> bool:
            screens.append(self.shown())
            return condition(screens[-1])

        assert eventually(holds, pause=0.2), f"{screens[-1]}\n{self._sizes()}"
        return screens[-1]

    def _sizes(self) -> str:
        """The sizes that tmux knows, and that of its terminal as the command sees it."""
        known = self._call("display", "-p", "#{window_width}x#{window_height} #{pane_tty}")
        tty = known.split()[1]
        seen = subprocess.run(["stty", "-F", tty, "size"], capture_output=True, text=True)
        return f"tmux: {known.strip()}, rows and columns of the terminal: {seen.stdout.strip()}"

    def close(self) -> None:
        """End the command and the server."""
        self._call("kill-server")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(size: tuple[int, int], *arguments: object, **variables: str) -> Terminal:
        folder = tmp_path / f"terminal-{len(started)}"
        folder.mkdir()
        words = [f"{name}={value}" for name, value in variables.items()]
        started.append(Terminal(folder, size, "env", *words, ZEROWATCH, "top", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_an_active_run_is_shown_resized_and_left_by_q(
    terminal: Callable[..., Terminal],
) -> None:
    with two_ranks() as ranks:
        screen = terminal(NARROW, ranks[0].targets_url)
        lines = screen.waits_for("steps 20", "ZerowatchStragglerRank"[9:]).splitlines()
        assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
        assert "night-7" in lines[0] and "training" in lines[0]
        assert any("backward" in line and "60.0%" in line for line in lines)
        assert any("+21%" in line for line in lines)

        ranks[0].add_steps(5)
        screen.waits_for("steps 25")
        ranks[1].close()
        screen.waits_for("1 silent", "no answer", "refused")

        screen.resize(WIDE)
        screen.waits_until(
            lambda shown: any(
                "Where the time goes" in line and "Memory" in line for line in shown.splitlines()
            )
        )
        screen.waits_for("node-0")
        screen.send("s")
        screen.waits_for("sorted by slow in")
        screen.resize(NARROW)
        screen.waits_until(lambda shown: max(map(len, shown.splitlines())) <= NARROW[0])

        screen.send("q")
        screen.waits_for("exit 0")


def test_a_finished_run_is_shown_from_its_folder(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "runs" / "night", steps=40)

    screen = terminal(WIDE, folder)
    screen.waits_for("night", "completed", "steps 40", "Nothing holds this run back")
    screen.send("q")
    screen.waits_for("exit 0")


def test_without_colors_no_color_is_sent(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "night", steps=40)

    plain = terminal(NARROW, folder, NO_COLOR="1")
    colored = terminal(NARROW, folder)
    for screen in (plain, colored):
        screen.waits_for("steps 40", "backward")

    assert "\x1b[32m" in colored.shown(codes=True)
    foreground = {f"\x1b[{code}m" for code in (*range(30, 38), *range(90, 98))}
    assert not any(code in plain.shown(codes=True) for code in foreground)
    assert "38;" not in plain.shown(codes=True)
