"""Exporters: HTTP for Prometheus, OTLP. Each library is used in one file."""
