"""The end of a run: how long a rank waits for Prometheus to read that it is over."""

from __future__ import annotations

import threading
import time

import pytest
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.exporters.scrapes import Scrapes


def scrape(address: str) -> None:
    """Scrape, and wait for the server to have taken note, which it does after its answer."""
    threads_before = threading.active_count()
    get(address)
    assert eventually(lambda: threading.active_count() <= threads_before)


def seconds_of(call) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_a_rank_that_was_never_scraped_does_not_linger(make_server, recorder):
    server = make_server()
    server.start()
    recorder.set(RUN_ACTIVE, 0)

    assert seconds_of(server.linger) < 1


def test_a_rank_that_is_still_training_does_not_linger(make_server):
    server = make_server()
    scrape(server.start())

    assert seconds_of(server.linger) < 1


def test_lingering_ends_as_soon_as_a_scrape_has_read_the_end(make_server, recorder):
    server = make_server(linger_seconds=20)
    address = server.start()
    scrape(address)
    recorder.set(RUN_ACTIVE, 0)
    last_scrape = threading.Timer(0.3, get, [address])
    last_scrape.start()

    lingered = seconds_of(server.linger)
    last_scrape.join()

    assert 0.2 < lingered < 5


def test_lingering_is_not_ended_by_another_page(make_server, recorder):
    server = make_server(linger_seconds=0.6)
    address = server.start()
    scrape(address)
    recorder.set(RUN_ACTIVE, 0)
    visit = threading.Timer(0.1, get, [address, "/healthz"])
    visit.start()

    lingered = seconds_of(server.linger)
    visit.join()

    assert lingered >= 0.6


@pytest.mark.parametrize(
    ("scraped_at", "now", "patience"),
    [
        ([], 0, 0),
        ([0], 10, 20),
        ([0, 15], 16, 18),
        ([0, 5, 10], 12, 6),
        ([0, 60], 61, 20),
        ([0, 15], 76, 0),
        ([0, 12, 15, 27, 30], 31, 14.4),
        ([0, 15, 16, 17, 18, 19], 20, 1.2),
    ],
    ids=[
        "never scraped",
        "scraped once: the interval is unknown",
        "1.2 intervals",
        "1.2 short intervals",
        "never more than the setting",
        "not scraped for a minute",
        "two scrapers: the longer gap",
        "an old gap is forgotten",
    ],
)
def test_the_patience_follows_the_scrapes_seen(scraped_at, now, patience):
    clock = iter([*scraped_at, now])
    scrapes = Scrapes(clock=lambda: next(clock))
    for _ in scraped_at:
        scrapes.note(run_active=1)

    assert scrapes.patience_seconds(20) == pytest.approx(patience)
