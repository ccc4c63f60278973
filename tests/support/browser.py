"""Opens pages in the machine's own chromium. Without it or playwright, the tests are skipped."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

# Far above what anything here takes, also where others take the machine.
PATIENCE_MS = 120_000


@contextlib.contextmanager
def open_browser(*arguments: str) -> Iterator[Browser]:
    """A browser without a window.

    Args:
        arguments: More arguments of chromium.
    """
    pytest.importorskip("playwright", reason="playwright is in the extra `preview`")
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage", *arguments]
        )
        with contextlib.closing(browser):
            yield browser


class Visit:
    """A page in a fresh context of a browser.

    Attributes:
        page: The page of playwright.
        requests: The method and address of each request.
        problems: Failed requests, responses with an error, and errors of scripts.
    """

    def __init__(self, browser: Browser, **context: Any) -> None:
        self.context: BrowserContext = browser.new_context(**context)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.requests: list[tuple[str, str]] = []
        self.problems: list[str] = []
        page = self.page
        page.on("request", lambda each: self.requests.append((each.method, each.url)))
        page.on("requestfailed", lambda each: self.problems.append(f"failed: {each.url}"))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on(
            "response",
            lambda each: each.status >= 400 and self.problems.append(f"{each.status} {each.url}"),
        )
        page.on(
            "console",
            lambda line: line.type == "error" and self.problems.append(f"console: {line.text}"),
        )

    def figures(self) -> dict[str, float]:
        """Return the figures that the page shows, by their key."""
        shown = self.page.eval_on_selector_all(
            "[data-key]", "all => all.map(each => [each.dataset.key, each.dataset.value])"
        )
        return {key: float(value) for key, value in shown if value}
