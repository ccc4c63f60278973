"""Scrapes an address as Prometheus does; `scrape_client.py ADDRESS SECONDS` repeats it."""

from __future__ import annotations

import gzip
import http.client
import sys
import time

HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}


def scrape(address: str) -> tuple[str, int]:
    """Return the text of /metrics and the bytes that came over the wire for it."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/metrics", headers=HEADERS)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{address} answered {response.status}")
    packed = response.headers.get("Content-Encoding") == "gzip"
    return (gzip.decompress(body) if packed else body).decode(), len(body)


def series_of(text: str) -> list[str]:
    """Return the series of an exposition: name and labels of each sample."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [line.partition(" # ")[0].rpartition("}")[0] or line.split()[0] for line in lines]


if __name__ == "__main__":
    while True:
        time.sleep(float(sys.argv[2]))
        scrape(sys.argv[1])
