"""The parts that training and dashboards share: metrics, settings, thresholds and file formats.

`runtime/` and `dashboards/` both import this package, and it imports neither of them, nor torch nor
DeepSpeed. `catalog/` describes every metric, `recorder.py` holds the current values, and
`exporters/` sends them to Prometheus and OpenTelemetry.
"""
