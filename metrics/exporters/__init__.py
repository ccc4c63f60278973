"""Exports metrics over HTTP for Prometheus, and by OTLP. Only one file imports each library."""
