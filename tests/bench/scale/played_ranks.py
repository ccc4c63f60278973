"""Serves the metrics of all ranks of a run from one process, and writes their past.

`played_ranks.py RANKS KINDS FIRST_TICK DETAIL` prints its address. For each line "ADDRESS
LAST_TICK" on stdin it writes all ticks up to that one into the Prometheus at that address, and
prints how many samples these were; at an empty line it lists the ranks on /targets.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.scale.job_profiles import DATA_PARALLEL
from bench.scale.rank_contents import INTERVAL_SECONDS, Contents, as_rank
from bench.scale.remote_write import RemoteWriter, encode_labels, encode_samples

from zerowatch.metrics.settings import Detail

RUN = "night-1024"
RANKS_A_NODE = 8
OPENMETRICS = "application/openmetrics-text"


def kind_of(rank: int, kinds: int) -> int:
    """Return a rank's kind; rank 0 has its own, as it reports the tuner and the whole run."""
    return 0 if rank == 0 else 1 + rank % (kinds - 1)


class Ranks:
    """Metrics of all ranks of a run; ranks of one kind have the same values."""

    def __init__(self, count: int, kinds: int, first_tick: int, detail: Detail) -> None:
        self.count = count
        self._kinds = kinds
        began = first_tick * INTERVAL_SECONDS
        self._contents = [
            Contents(kind, DATA_PARALLEL, detail, ranks=count, on_rank_zero=kind == 0, began=began)
            for kind in range(kinds)
        ]
        self._tick = first_tick - 1
        self._served_tick = 0
        self._pages: list[tuple[str, bytes]] = []
        self._lock = threading.Lock()
        self._labels: dict[tuple[int, str], bytes] = {}

    def scrape(self, rank: int) -> tuple[str, bytes]:
        """Return content type and text of a rank as it is now."""
        with self._lock:
            tick = int(time.time() // INTERVAL_SECONDS)
            if self._served_tick != tick:
                self._advance_to(tick)
                self._served_tick = tick
                self._pages = [contents.text(OPENMETRICS) for contents in self._contents]
            content_type, text = self._pages[kind_of(rank, self._kinds)]
        return content_type, as_rank(text, rank)

    def write_past(self, writer: RemoteWriter, last_tick: int) -> int:
        """Write the ticks since the last one that was written; return the number of samples."""
        ticks = range(self._tick + 1, last_tick + 1)
        seen = [dict[str, list[float]]() for _ in self._contents]
        for tick in ticks:
            self._advance_to(tick)
            for values, contents in zip(seen, self._contents, strict=True):
                for series, value in _parsed(contents.text("")[1].decode()):
                    values.setdefault(series, []).append(value)
        times = [tick * INTERVAL_SECONDS * 1000 for tick in ticks]
        encoded = [
            {name: encode_samples(values, times) for name, values in kind.items()} for kind in seen
        ]
        for rank in range(self.count):
            kind = encoded[kind_of(rank, self._kinds)]
            writer.write((self._labels_of(rank, name), samples) for name, samples in kind.items())
        return len(ticks) * sum(len(seen[kind_of(r, self._kinds)]) for r in range(self.count))

    def _advance_to(self, tick: int) -> None:
        for contents in self._contents:
            for _ in range(tick - self._tick):
                contents.advance()
        self._tick = tick

    def _labels_of(self, rank: int, series: str) -> bytes:
        known = self._labels.get((rank, series))
        if known is None:
            name, _, rest = series.partition("{")
            own = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            labels = {"__name__": name, "job": "zerowatch", **own, **target_labels(rank)}
            known = self._labels[rank, series] = encode_labels(labels)
        return known


def target_labels(rank: int) -> dict[str, str]:
    node = f"node-{rank // RANKS_A_NODE:03}"
    instance = f"{node}:{9464 + rank % RANKS_A_NODE}"
    return {"run": RUN, "node": node, "rank": str(rank), "instance": instance}


def _parsed(text: str) -> Iterator[tuple[str, float]]:
    """Yield the series of a text with their values, and `up`, which Prometheus adds."""
    yield "up", 1.0
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            yield series, float(value)


class Site(ThreadingHTTPServer):
    """HTTP server for /targets, and for the metrics of each rank at /<rank>."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.ranks = ranks
        self.is_open = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a Prometheus go that has no time to read, or ends."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def targets(self) -> list[dict[str, object]]:
        address = f"127.0.0.1:{self.server_address[1]}"
        return [
            {
                "targets": [address],
                "labels": {"__metrics_path__": f"/{rank}", **target_labels(rank)},
            }
            for rank in range(self.ranks.count if self.is_open else 0)
        ]


class _Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Prometheus keeps its connections
    disable_nagle_algorithm = True
    server: Site

    def do_GET(self) -> None:
        if self.path == "/targets":
            content_type, body = "application/json", json.dumps(self.server.targets()).encode()
        else:
            content_type, body = self.server.ranks.scrape(int(self.path[1:]))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    detail: Detail = "lean" if sys.argv[4] == "lean" else "full"
    ranks = Ranks(*map(int, sys.argv[1:4]), detail)
    site = Site(ranks)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    print(f"127.0.0.1:{site.server_address[1]}", flush=True)
    for line in sys.stdin:
        if not line.strip():
            site.is_open = True
            continue
        address, last_tick = line.split()
        writer = RemoteWriter(address)
        print(ranks.write_past(writer, int(last_tick)), flush=True)
        writer.close()


if __name__ == "__main__":
    main()
