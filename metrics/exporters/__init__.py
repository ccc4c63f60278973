"""Exports metrics over HTTP for Prometheus, and by OTLP. Each library is used in one file."""
