"""Tests of the wait for the last scrapes: how long a rank that ends keeps serving."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time

import pytest
from fakes.clock import FakeClock, set_clock
from fakes.scraper import eventually, get

from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.exporters import listener, scrape_tracker
from zerowatch.metrics.exporters import server as server_module
from zerowatch.metrics.exporters.scrape_tracker import ScrapeTracker
from zerowatch.metrics.exporters.server import INTERRUPTED_SECONDS, QUIET_SECONDS
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings

# Far more than any scrape takes, on a busy machine too.
LINGER_SECONDS = 300


def scrape(address: str, client: str = "prometheus", path: str = "/metrics") -> None:
    """Scrape, and wait until the server has recorded the scrape, which it does after its answer."""
    get(address, path, **{"User-Agent": client})
    get(address, "/nothing")  # answered by the same thread


def scrape_as_prometheus(address: str) -> None:
    get(address, X_Prometheus_Scrape_Timeout_Seconds="10")
    get(address, "/nothing")


def seconds_of(call) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_a_rank_that_was_never_scraped_does_not_linger(make_server, recorder):
    server = make_server(linger_seconds=LINGER_SECONDS)
    server.start()
    recorder.set(RUN_ACTIVE, 0)

    assert seconds_of(server.wait_for_final_scrape) < LINGER_SECONDS


def test_a_rank_that_is_still_training_does_not_linger(make_server, monkeypatch):
    clock, waits = [0.0], []
    monkeypatch.setattr(
        ScrapeTracker, "wait_until_end_was_read", lambda *_, **__: waits.append(clock[0])
    )
    server = make_server(linger_seconds=LINGER_SECONDS, now=lambda: clock[0])
    address = server.start()
    for clock[0] in (0, 30):
        scrape(address)

    server.wait_for_final_scrape()

    assert not waits


def test_lingering_ends_as_soon_as_a_scrape_has_read_the_end(make_server, recorder):
    clock = [0.0]
    server = make_server(linger_seconds=LINGER_SECONDS, now=lambda: clock[0])
    address = server.start()
    for clock[0] in (0, LINGER_SECONDS):
        scrape(address)
    recorder.set(RUN_ACTIVE, 0)
    lingering = threading.Thread(target=server.wait_for_final_scrape)
    lingering.start()

    lingering.join(0.05)
    was_lingering = lingering.is_alive()
    scrape(address)
    lingering.join(LINGER_SECONDS / 2)

    assert was_lingering
    assert not lingering.is_alive()


def test_a_short_run_that_prometheus_has_scraped_once_lingers_until_its_end_is_read(
    make_server, recorder
):
    server = make_server(linger_seconds=LINGER_SECONDS)
    address = server.start()
    scrape_as_prometheus(address)
    recorder.set(RUN_ACTIVE, 0)
    lingering = threading.Thread(target=server.wait_for_final_scrape)
    lingering.start()

    lingering.join(0.05)
    was_lingering = lingering.is_alive()
    scrape_as_prometheus(address)
    lingering.join(LINGER_SECONDS)

    assert was_lingering
    assert not lingering.is_alive()
    assert server._scrapes.patience_seconds(LINGER_SECONDS) == 0


def test_a_request_for_another_page_does_not_end_lingering(make_server, recorder):
    clock = [0.0]
    server = make_server(linger_seconds=0.1, now=lambda: clock[0])
    address = server.start()
    for clock[0] in (0, 30):
        scrape(address)
    recorder.set(RUN_ACTIVE, 0)
    get(address, "/healthz")

    assert seconds_of(server.wait_for_final_scrape) >= 0.1


def test_a_later_run_has_the_port_at_once_and_answers_for_the_one_that_lingers(
    make_server, recorder
):
    def server_of(run, recorder, **settings):
        return make_server(
            recorder=recorder,
            serves_run=lambda asked: asked == run,
            targets=lambda: [run],
            now=lambda: clock[0],
            linger_seconds=LINGER_SECONDS,
            **settings,
        )

    clock, withdrawn, later = [0.0], threading.Event(), Recorder()
    later.set(RUN_ACTIVE, 1)
    first = server_of("first", recorder)
    address = first.start()
    for clock[0] in (0, 30):
        scrape(address, path="/metrics?run=first")
    recorder.set(RUN_ACTIVE, 0)
    first.close_after_final_scrape(withdrawn.set)
    second = server_of("second", later, port=int(address.rpartition(":")[2]), strict_port=True)

    assert second.start() == address
    assert json.loads(get(address, "/targets")[2]) == ["second", "first"]
    assert 'run_active{rank="0"} 1.0' in get(address)[2]
    assert 'run_active{rank="0"} 1.0' in get(address, "/metrics?run=second")[2]
    assert not withdrawn.is_set()
    last = get(address, "/metrics?run=first", User_Agent="prometheus")[2]
    assert 'run_active{rank="0"} 0.0' in last
    assert withdrawn.wait(LINGER_SECONDS)
    assert eventually(lambda: get(address, "/metrics?run=first")[0] == 404)
    assert json.loads(get(address, "/targets")[2]) == ["second"]


def test_a_later_run_answers_at_the_fallback_port_of_the_one_that_lingers(
    make_server, recorder, monkeypatch
):
    monkeypatch.setattr(listener, "PORT_RETRY_SECONDS", 0.01)
    clock = [0.0]

    def server_of(run, recorder):
        return make_server(
            recorder=recorder,
            serves_run=lambda asked: asked == run,
            now=lambda: clock[0],
            linger_seconds=LINGER_SECONDS,
            port=port,
        )

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = server_of("first", recorder)
        fallback = first.start()
    assert eventually(lambda: port in first._listener.ports)
    for clock[0] in (0, 30):
        scrape(fallback, path="/metrics?run=first")
    recorder.set(RUN_ACTIVE, 0)
    first.close_after_final_scrape()
    later = Recorder()
    later.set(RUN_ACTIVE, 1)

    address = server_of("second", later).start()

    assert address == f"127.0.0.1:{port}"
    assert 'run_active{rank="0"} 1.0' in get(address)[2]
    assert 'run_active{rank="0"} 0.0' in get(fallback, "/metrics?run=first")[2]


@pytest.mark.parametrize("has_agent", [False, True])
@pytest.mark.parametrize(("linger_seconds", "expected"), [(75, INTERRUPTED_SECONDS), (9, 9)])
def test_after_ctrl_c_the_wait_is_shorter_and_announced(
    make_server, recorder, monkeypatch, caplog, linger_seconds, expected, has_agent
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if has_agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    clock, waits = [0.0], []

    def wait(
        self: ScrapeTracker,
        max_seconds: float,
        on_all_ranks: bool,
        returns_after: float = math.inf,
    ) -> float:
        waits.append((max_seconds, returns_after))
        return max_seconds if returns_after == 0 else 0.0  # else the end is read at once

    monkeypatch.setattr(
        ScrapeTracker,
        "wait_until_end_was_read",
        wait,
    )
    server = make_server(linger_seconds=linger_seconds, now=lambda: clock[0])
    address = server.start()
    for clock[0] in (0, 30):
        scrape(address)
    recorder.set(RUN_ACTIVE, 0)

    server.wait_for_final_scrape()
    before = caplog.messages[:]
    server.wait_for_final_scrape(interrupted=True)

    assert waits == [
        (linger_seconds, QUIET_SECONDS),
        (expected, 0.0),
        (pytest.approx(expected), math.inf),
    ]
    assert before == []
    assert f"at most {expected:.0f} s" in caplog.messages[0]
    assert ("Ctrl-C" in caplog.messages[0]) is not has_agent


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_wait_at_exit_is_announced_by_rank_0(
    make_server, recorder, monkeypatch, caplog, rank
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(server_module, "QUIET_SECONDS", 0.01)
    server = make_server(rank=rank, linger_seconds=LINGER_SECONDS)
    address = server.start()
    scrape_as_prometheus(address)
    recorder.set(RUN_ACTIVE, 0)
    waiting = threading.Thread(target=server.wait_for_final_scrape)
    began = time.monotonic()
    waiting.start()
    was_announced = eventually(lambda: caplog.messages != [], 60 if rank == 0 else 0.2)
    announced_within = time.monotonic() - began
    was_waiting = waiting.is_alive()
    scrape_as_prometheus(address)
    waiting.join(LINGER_SECONDS)

    assert was_waiting
    assert not waiting.is_alive()
    assert was_announced is (rank == 0)
    for message in caplog.messages:
        [seconds] = re.findall(r"at most (\d+) s", message)
        assert 72 - announced_within <= int(seconds) <= 72
        assert "Ctrl-C" in message


def test_a_wait_for_the_last_scrape_while_the_script_goes_on_is_not_announced(
    make_server, recorder, monkeypatch, caplog
):
    monkeypatch.setattr(server_module, "QUIET_SECONDS", 0.0)
    server = make_server(linger_seconds=LINGER_SECONDS)
    address = server.start()
    scrape_as_prometheus(address)
    recorder.set(RUN_ACTIVE, 0)
    closed = threading.Event()
    server.close_after_final_scrape(closed.set)
    was_waiting = not closed.wait(0.1)
    get(address, X_Prometheus_Scrape_Timeout_Seconds="10")  # the server closes upon it

    assert was_waiting
    assert closed.wait(LINGER_SECONDS)
    assert caplog.messages == []


def test_the_wait_at_exit_ends_as_soon_as_the_server_has_closed(make_server, recorder):
    server = make_server(linger_seconds=LINGER_SECONDS)
    scrape_as_prometheus(server.start())
    recorder.set(RUN_ACTIVE, 0)
    waiting = threading.Thread(target=server.wait_for_final_scrape)
    waiting.start()
    assert eventually(lambda: server._scrapes._ended_at is not None)

    server.close()
    waiting.join(LINGER_SECONDS)

    assert not waiting.is_alive()


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_a_later_wait_counts_from_the_end_of_the_run(monkeypatch, on_all_ranks):
    clock = FakeClock()
    set_clock(monkeypatch, scrape_tracker, monotonic=clock)
    scrapes = ScrapeTracker(now=clock)
    scrapes.note("prometheus", run_active=1, timeout_seconds=10)
    left = []
    for pause_seconds in (0, 50, 30):
        clock.seconds += pause_seconds
        left.append(scrapes.wait_until_end_was_read(75, on_all_ranks=on_all_ranks, returns_after=0))

    assert left == pytest.approx([72, 22, 0])


@pytest.mark.parametrize("wait", ["wait_until_end_was_read", "wait_until_read"])
def test_a_tracker_that_is_closed_waits_for_nobody(wait):
    scrapes = ScrapeTracker()
    scrapes.note("prometheus", run_active=1, timeout_seconds=LINGER_SECONDS)
    waiting = threading.Thread(target=getattr(scrapes, wait), args=(LINGER_SECONDS,))
    waiting.start()
    waiting.join(0.05)
    was_waiting = waiting.is_alive()

    scrapes.close()
    waiting.join(LINGER_SECONDS)

    assert was_waiting
    assert not waiting.is_alive()


def test_the_clients_are_not_read_while_a_scrape_is_recorded():
    scrapes, patience = ScrapeTracker(), []
    scrapes.note("prometheus", run_active=1, timeout_seconds=10)
    reading = threading.Thread(target=lambda: patience.append(scrapes.patience_seconds(75)))

    with scrapes._changed:
        reading.start()
        reading.join(0.05)
        early = list(patience)
    reading.join(LINGER_SECONDS)

    assert (early, patience) == ([], [pytest.approx(72)])


def patience_after(scraped_at, now, limit, timeout_seconds=None):
    """Return the wait at the end for one client, which was there at these times."""
    clock = iter([*scraped_at, now])
    scrapes = ScrapeTracker(now=lambda: next(clock))
    for _ in scraped_at:
        scrapes.note("prometheus", run_active=1, timeout_seconds=timeout_seconds)
    return scrapes.patience_seconds(limit)


@pytest.mark.parametrize(
    ("scraped_at", "now", "patience"),
    [
        ([], 0, 0),
        ([0], 10, 0),
        ([0, 15], 16, 18),
        ([0, 5, 10], 12, 6),
        ([0, 60], 61, 20),
        ([0, 15], 76, 0),
        ([0, 5, 10], 26, 0),
        ([0, 12, 15, 27, 30], 31, 18),
        ([0, 12, 15, 30, 45, 60, 75], 76, 18),
        ([0, 15, 16, 17, 18, 19], 20, 1.2),
    ],
    ids=[
        "never scraped",
        "scraped once: no scraper",
        "1.2 intervals",
        "1.2 short intervals",
        "never more than the setting",
        "not scraped for a minute",
        "not scraped for three of its intervals",
        "two scrapers that look alike: their interval",
        "of two scrapers that look alike, one has gone",
        "an old gap is forgotten",
    ],
)
def test_the_wait_depends_on_the_intervals_between_scrapes(scraped_at, now, patience):
    assert patience_after(scraped_at, now, 20) == pytest.approx(patience)


@pytest.mark.parametrize(
    ("scraped_at", "now", "patience"),
    [
        ([0], 10, 72),
        ([0], 180, 72),
        ([0], 181, 0),
        ([0, 2], 3, 72),
        ([0, 15], 16, 18),
        ([0, 9.8], 10, 11.76),
        ([0, 2, 15, 17], 18, 18),
        ([0, 2, 15, 17, 30, 32, 45, 48.5], 49, 19.8),
        ([0, 15, 28.5, 45, 60], 61, 19.8),
        ([0, 90], 91, 75),
    ],
    ids=[
        "scraped once: 1.2 times a minute",
        "scraped once, three minutes ago",
        "scraped once, longer ago",
        "two servers that look alike, each scraped once",
        "1.2 intervals",
        "an interval like the timeout, with jitter",
        "two servers that look alike: their interval",
        "two servers that look alike, with a late answer",
        "a server with a late answer",
        "never more than the setting",
    ],
)
def test_prometheus_is_regular_from_its_first_scrape_on(scraped_at, now, patience):
    found = patience_after(scraped_at, now, 75, timeout_seconds=10)

    assert found == pytest.approx(patience)


def test_the_default_setting_waits_for_a_scraper_with_an_interval_of_a_minute():
    most = ServeSettings().linger_seconds
    clock = [0.0]

    scrapes = scraped(clock, [(0, "prometheus", 1), (60, "prometheus", 1)])
    clock[0] = 200

    assert (most, scrapes.patience_seconds(most)) == (75, pytest.approx(72))


@pytest.mark.parametrize("interval", [5, 15, 30, 60])
def test_all_ranks_are_read_as_ended_at_usual_scrape_intervals(interval):
    most, num_ranks = ServeSettings().linger_seconds, 16
    unread = []
    for rank in range(num_ranks):
        # Prometheus scrapes each rank at another moment of the interval. All ranks end together.
        clock, first = [0.0], interval * rank / num_ranks
        scrapes = scraped(clock, [(first + n * interval, "prometheus", 1) for n in range(3)])
        clock[0] = ended = 3 * interval
        next_scrape = first + 3 * interval + 0.1 * interval  # with a delay of its answer
        if next_scrape - ended > scrapes.patience_seconds(most):
            unread.append(rank)

    assert unread == []


def test_a_single_request_is_not_waited_for():
    assert scraped([0.0], [(0, "curl", 1)]).patience_seconds(75) == 0


def test_after_a_single_request_a_server_closes_at_once(make_server, recorder, monkeypatch):
    server = make_server(linger_seconds=LINGER_SECONDS)
    scrape(server.start())
    recorder.set(RUN_ACTIVE, 0)
    patience = []
    patience_seconds = ScrapeTracker.patience_seconds

    def record(tracker: ScrapeTracker, max_seconds: float) -> float:
        patience.append(patience_seconds(tracker, max_seconds))
        return patience[-1]

    monkeypatch.setattr(ScrapeTracker, "patience_seconds", record)
    server.wait_for_final_scrape()

    assert patience == [0.0]


def scraped(clock: list[float], visits: list[tuple[float, str, float]]) -> ScrapeTracker:
    """Return the scrapes recorded after `visits`: time, client and the value of run_active."""
    scrapes = ScrapeTracker(now=lambda: clock[0])
    for at, client, run_active in visits:
        clock[0] = at
        scrapes.note(client, run_active=run_active)
    return scrapes


def test_each_of_two_prometheus_servers_is_waited_for():
    clock = [0.0]
    visits = [(0, "often", 1), (1, "seldom", 1), (5, "often", 1), (16, "seldom", 1)]
    scrapes = scraped(clock, [*visits, (17, "often", 1), (25, "often", 0)])

    assert scrapes.patience_seconds(20) == pytest.approx(1.2 * 15)

    scrapes.note("seldom", run_active=0)
    assert scrapes.patience_seconds(20) == 0


# Seconds from the scrape of one Prometheus server to that of the other, of 15.
@pytest.mark.parametrize("offset", [0.2, 4, 7.2, 14])
def test_each_of_two_servers_that_look_like_one_client_is_waited_for(offset):
    clock = [0.0]
    times = [start + 15 * number for number in range(4) for start in (0, offset)]
    scrapes = scraped(clock, [(at, "prometheus", 1) for at in times])

    clock[0] = 60
    scrapes.note("prometheus", run_active=0)
    after_the_first = scrapes.patience_seconds(75)
    clock[0] += offset
    scrapes.note("prometheus", run_active=0)

    assert after_the_first == pytest.approx(18)
    assert scrapes.patience_seconds(75) == 0


def test_each_of_two_servers_that_look_like_one_client_scrapes_once_more():
    clock = [0.0]
    scrapes = scraped(clock, [(at, "prometheus", 1) for at in (0, 4, 15, 19)])
    scrapes.wait_until_read(0)

    clock[0] = 30
    scrapes.note("prometheus", run_active=1)
    assert seconds_of(lambda: scrapes.wait_until_read(11.1)) >= 0.09
    clock[0] = 34
    scrapes.note("prometheus", run_active=1)
    assert seconds_of(lambda: scrapes.wait_until_read(LINGER_SECONDS)) < LINGER_SECONDS


def test_each_regular_client_is_waited_for_until_it_has_scraped_once_more():
    clock = [0.0]
    visits = [(0, "prometheus", 1), (3, "curl", 1), (LINGER_SECONDS, "prometheus", 1)]
    scrapes = scraped(clock, visits)
    waiting = threading.Thread(target=scrapes.wait_until_read, args=(LINGER_SECONDS,))
    waiting.start()
    eventually(lambda: scrapes._asked_at is not None)
    early = waiting.is_alive()

    clock[0] += 1
    scrapes.note("prometheus", run_active=1)
    waiting.join(LINGER_SECONDS)

    assert early and not waiting.is_alive()
    assert seconds_of(lambda: scrapes.wait_until_read(LINGER_SECONDS)) < LINGER_SECONDS
    clock[0] += LINGER_SECONDS
    assert seconds_of(lambda: scrapes.wait_until_read(LINGER_SECONDS)) < LINGER_SECONDS


def test_after_its_first_scrape_prometheus_is_waited_for_until_it_has_scraped_once_more():
    clock = [0.0]
    scrapes = ScrapeTracker(now=lambda: clock[0])
    scrapes.note("prometheus", run_active=1, timeout_seconds=10)
    scrapes.note("curl", run_active=1)

    assert seconds_of(lambda: scrapes.wait_until_read(0.1)) >= 0.1

    clock[0] = 0.05
    scrapes.note("prometheus", run_active=1, timeout_seconds=10)
    assert seconds_of(lambda: scrapes.wait_until_read(LINGER_SECONDS)) < LINGER_SECONDS


def test_a_client_that_does_not_scrape_again_is_not_waited_for_longer_than_the_limit():
    clock = [0.0]
    scrapes = scraped(clock, [(0, "prometheus", 1), (1000, "prometheus", 1)])
    scrapes.wait_until_read(0)
    clock[0] += 1 + LINGER_SECONDS

    assert seconds_of(lambda: scrapes.wait_until_read(LINGER_SECONDS)) < LINGER_SECONDS


def test_rank_0_waits_as_long_as_the_other_ranks_scrapes_may_take():
    clock = [0.0]
    visits = [(0, "prometheus", 1), (0.1, "prometheus", 1), (0.2, "prometheus", 0)]
    scrapes = scraped(clock, visits)

    def wait() -> None:
        scrapes.wait_until_end_was_read(LINGER_SECONDS, on_all_ranks=True)

    assert seconds_of(wait) >= 0.12  # 1.2 intervals, though this rank's end was read
    for clock[0] in (LINGER_SECONDS, 2 * LINGER_SECONDS):
        scrapes.note("prometheus", run_active=0)
    assert seconds_of(wait) < LINGER_SECONDS  # not again


def test_rank_0_waits_no_longer_than_an_interval_that_the_next_scrape_shows(monkeypatch):
    monkeypatch.setattr(scrape_tracker, "ASSUMED_INTERVAL_SECONDS", 100 * LINGER_SECONDS)
    clock = [0.0]
    scrapes = ScrapeTracker(now=lambda: clock[0])
    scrapes.note("prometheus", run_active=1, timeout_seconds=0.1)
    waiting = threading.Thread(
        target=scrapes.wait_until_end_was_read,
        args=(2 * LINGER_SECONDS,),
        kwargs={"on_all_ranks": True},
    )
    waiting.start()
    waiting.join(0.05)
    was_waiting = waiting.is_alive()

    clock[0] = 0.1
    scrapes.note("prometheus", run_active=0, timeout_seconds=0.1)
    waiting.join(LINGER_SECONDS)

    assert was_waiting
    assert not waiting.is_alive()


def test_a_single_manual_request_does_not_end_the_wait_of_rank_0_but_ctrl_c_does():
    clock = [0.0]
    scrapes = scraped(clock, [(0, "prometheus", 1), (LINGER_SECONDS, "prometheus", 1)])
    clock[0] = 3.9 * LINGER_SECONDS
    waiting = threading.Thread(
        target=scrapes.wait_until_end_was_read,
        args=(LINGER_SECONDS,),
        kwargs={"on_all_ranks": True},
        daemon=True,
    )
    waiting.start()
    assert eventually(lambda: scrapes._ended_at is not None)

    with scrapes._changed:  # the thread waits
        clock[0] = 4.1 * LINGER_SECONDS  # more than three intervals after the last scrape
    scrapes.note("curl", run_active=0)
    waiting.join(0.1)
    was_waiting = waiting.is_alive()
    scrapes.wait_until_end_was_read(0, on_all_ranks=True)  # as after Ctrl-C
    scrapes.note("curl", run_active=0)
    waiting.join(LINGER_SECONDS)

    assert was_waiting
    assert not waiting.is_alive()


def test_a_wait_of_rank_0_after_ctrl_c_has_its_whole_time_long_after_the_end_of_the_run():
    clock = [0.0]
    scrapes = scraped(clock, [(0, "prometheus", 1), (LINGER_SECONDS, "prometheus", 1)])
    waiting = threading.Thread(
        target=scrapes.wait_until_end_was_read,
        args=(LINGER_SECONDS,),
        kwargs={"on_all_ranks": True},
    )
    waiting.start()
    waiting.join(0.2)

    waited = seconds_of(lambda: scrapes.wait_until_end_was_read(0.1, on_all_ranks=True))
    scrapes.note("curl", run_active=0)
    waiting.join(LINGER_SECONDS / 2)

    assert waited >= 0.1
    assert not waiting.is_alive()


def test_a_single_manual_request_neither_ends_nor_extends_the_wait():
    clock = [0.0]
    visits = [(0, "prometheus", 1), (2, "curl", 1), (5, "prometheus", 1), (6, "curl", 0)]

    scrapes = scraped(clock, visits[:3])
    assert scrapes.patience_seconds(20) == pytest.approx(6)

    scrapes = scraped(clock, visits)
    assert scrapes.patience_seconds(20) == pytest.approx(6)


def test_a_client_that_has_stopped_scraping_is_not_waited_for():
    clock = [0.0]
    visits = [(0, "gone", 1), (5, "gone", 1), (60, "here", 1), (70, "here", 0)]

    scrapes = scraped(clock, visits)

    assert scrapes.patience_seconds(20) == 0


def test_a_server_distinguishes_its_clients(make_server, recorder):
    clock = [0.0]
    server = make_server(linger_seconds=20, now=lambda: clock[0])
    address = server.start()
    for clock[0] in (0, 0.1):
        for name in ("first", "second"):
            scrape(address, name)
    recorder.set(RUN_ACTIVE, 0)
    scrape(address, "first")

    lingered = seconds_of(server.wait_for_final_scrape)

    assert lingered >= 0.12  # for the second, which never came: 1.2 intervals
