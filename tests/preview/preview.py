"""Draws dashboards with the panels that Grafana publishes and the data of a Prometheus.

Some kinds of panel are not published and are imitated here, so Grafana itself may draw them
differently. The first use installs about 420 MB of npm packages below .build/.

    python tests/preview/preview.py --prometheus http://127.0.0.1:9090 --out pictures overview
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from zerowatch.dashboards.definitions import DASHBOARDS
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".build" / "preview"
CHROMIUM = "/usr/bin/chromium"
POINTS = 240  # of a graph
WIDTH = 1600  # pixels
LABEL = "preview: drawn without Grafana, some panels by likeness"
WAIT_SECONDS = 60


def main() -> None:
    """Draw the dashboards given on the command line; by default all."""
    options = parsed()
    bundle()
    options.out.mkdir(parents=True, exist_ok=True)
    failures = 0
    with served() as address, browser_page() as page:
        for dashboard in DASHBOARDS:
            if options.dashboards and dashboard.name not in options.dashboards:
                continue
            content = dashboard_json(dashboard)
            write_json("dashboard.json", expanded(content) if options.expand else content)
            write_json("settings.json", settings(options))
            picture = options.out / f"{dashboard.uid}.png"
            failed = draw(page, address, picture)
            failures += len(failed)
            print(f"{picture}: {'; '.join(failed) or 'drawn'}")
    sys.exit(1 if failures else 0)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prometheus", required=True, help="its address, such as http://...:9090")
    parser.add_argument("--out", required=True, type=Path, help="folder for the pictures")
    parser.add_argument("--range", type=float, default=600, help="seconds until now that are shown")
    parser.add_argument("--run", default=".*", help="of which run; by default of all there are")
    parser.add_argument("--run-a", default=".*", help="the first run of the dashboard Compare")
    parser.add_argument("--run-b", default=".*", help="the second run of the dashboard Compare")
    parser.add_argument("--expand", action="store_true", help="open all collapsed rows")
    parser.add_argument("--window", default="20s", help="in place of $__rate_interval")
    names = [dashboard.name for dashboard in DASHBOARDS]
    parser.add_argument("dashboards", nargs="*", metavar="DASHBOARD", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    if unknown := set(options.dashboards) - set(names):
        parser.error(f"no dashboard is called {', '.join(sorted(unknown))}; there are {names}")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the page: data source, time range and run."""
    step = max(1, round(options.range / POINTS))
    now = int(time.time())
    return {
        "dashboard": "dashboard.json",
        "prometheus": options.prometheus.rstrip("/"),
        "from": now - round(options.range / step) * step,
        "to": now,
        "step": step,
        "window": options.window,
        "run": options.run,
        "run_a": options.run_a,
        "run_b": options.run_b,
        "label": LABEL,
    }


def expanded(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Return the dashboard with its collapsed rows open, and what is below moved down."""
    opened: list[dict[str, Any]] = []
    down = 0
    for panel in dashboard["panels"]:
        inner = panel.get("panels", [])
        opened += [moved({**panel, "collapsed": False, "panels": []}, down)]
        opened += [moved(each, down) for each in inner]
        bottom = max((each["gridPos"]["y"] + each["gridPos"]["h"] for each in inner), default=0)
        down += max(0, bottom - panel["gridPos"]["y"] - panel["gridPos"]["h"]) if inner else 0
    return {**dashboard, "panels": opened}


def moved(panel: dict[str, Any], down: int) -> dict[str, Any]:
    """Return the panel, placed lower on the page."""
    place = panel["gridPos"]
    return {**panel, "gridPos": {**place, "y": place["y"] + down}}


def write_json(name: str, content: dict[str, Any]) -> None:
    """Write a file to the folder that is served to the page."""
    (CACHE / name).write_text(json.dumps(content))


def bundle() -> None:
    """Install the packages if they changed, and bundle the page."""
    CACHE.mkdir(parents=True, exist_ok=True)
    mark = CACHE / "installed-package-lock.json"
    lock = (HERE / "package-lock.json").read_text()
    if not mark.is_file() or mark.read_text() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, CACHE)
        install = ["npm", "ci", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund"]
        subprocess.run(install, cwd=CACHE, check=True)
        mark.write_text(lock)
    shutil.copytree(HERE / "src", CACHE / "src", dirs_exist_ok=True)
    shutil.copy(HERE / "page.html", CACHE)
    subprocess.run(
        [
            "node_modules/.bin/esbuild",
            "src/main.tsx",
            "--bundle",
            "--minify",
            "--format=iife",
            "--outfile=bundle.js",
            '--define:process.env.NODE_ENV="production"',
            "--loader:.svg=dataurl",
            "--loader:.ttf=dataurl",
            "--alias:react-custom-scrollbars-2=./src/scrollbars.cjs",
            "--jsx=automatic",
            "--log-level=error",
        ],
        cwd=CACHE,
        check=True,
    )


@contextmanager
def served() -> Iterator[str]:
    """Serve the page on a free port of this machine."""
    handler = functools.partial(QuietHandler, directory=CACHE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/page.html"
    finally:
        server.shutdown()
        server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def browser_page() -> Iterator[Page]:
    """Open a page in this machine's chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        try:
            yield browser.new_page(viewport={"width": WIDTH, "height": 900})
        finally:
            browser.close()


def draw(page: Page, address: str, picture: Path) -> list[str]:
    """Save a picture of the dashboard, and return the errors that the page reported."""
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)[:300]))
    page.goto(address)
    page.wait_for_selector("section", timeout=WAIT_SECONDS * 1000)
    page.wait_for_function(
        "document.querySelectorAll('[data-waiting]').length === 0", timeout=WAIT_SECONDS * 1000
    )
    page.wait_for_timeout(1500)  # graphs are drawn a moment after they have their values
    page.screenshot(path=picture, full_page=True)
    return [*failures, *(text[:300] for text in page.locator("pre").all_inner_texts())]


if __name__ == "__main__":
    main()
