"""Stands in for the watch of an engine that a framework made; keeps what is passed to it."""

from __future__ import annotations


class FrameworkWatch:
    is_open = True

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, object], int | None]] = []
        self.sinks: list[object] = []
        self.ended: bool | None = None

    def log_values(self, values: dict[str, object], step: int | None = None) -> None:
        assert self.is_open
        self.logged.append((values, step))

    def add_sink(self, sink: object) -> None:
        self.sinks.append(sink)

    def close(self, *, failed: bool) -> None:
        self.is_open, self.ended = False, failed
