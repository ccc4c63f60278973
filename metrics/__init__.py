"""Defines what training and dashboards share: metrics, settings, thresholds and file formats.

`runtime/` and `dashboards/` both import this package. It imports neither of these packages, and
neither torch nor DeepSpeed. `catalog/` describes every metric, `recorder.py` holds the current
values, and `exporters/` sends the values to Prometheus and OpenTelemetry.
"""
