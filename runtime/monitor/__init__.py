"""Monitors one engine. `Watch` connects the lower packages to the run folder, threads and OTLP."""
