"""Fixtures: a recorder with values of a running job, and servers closed after the test."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import pytest

from zerowatch.metrics.catalog.training import RUN_ACTIVE, STEPS
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen


@pytest.fixture
def recorder():
    recorder = Recorder()
    recorder.set(RUN_ACTIVE, 1)
    recorder.add(STEPS, 4)
    return recorder


@pytest.fixture
def fail_open():
    """The makers of the servers' threads, which counts their failures."""
    return FailOpen()


@pytest.fixture
def make_server(recorder, fail_open):
    with contextlib.ExitStack() as servers:

        def make(
            *,
            recorder=recorder,
            rank=0,
            local_rank=0,
            targets=None,
            now=time.monotonic,
            unix_now=time.time,
            is_watch_dead=lambda: False,
            serves_run=lambda _: True,
            pages=None,
            **settings,
        ):
            server = MetricsServer(
                recorder=recorder,
                rank=rank,
                local_rank=local_rank,
                settings=ServeSettings(**{"port": 0, **settings}),
                targets=targets,
                make_thread=partial(fail_open.thread, pause_seconds=0.0),
                now=now,
                unix_now=unix_now,
                is_watch_dead=is_watch_dead,
                serves_run=serves_run,
                pages=pages,
            )
            servers.callback(server.close)
            return server

        yield make
