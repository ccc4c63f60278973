"""Monitors one engine: `Watch` connects the packages below, with run folder, threads and OTLP."""
