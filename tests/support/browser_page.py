"""Opens pages in the machine's own chromium, for tests of what people look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import require


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser of playwright; skip the test if it or chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = require.program("chromium", apt="chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield a page, and a list that gets its errors and all requests but the first one."""
    page = browser.new_page(**options)
    seen: list[str] = []
    page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("request", lambda request: request.url == address or seen.append(request.url))
    page.goto(address)
    yield page, seen
    page.close()
