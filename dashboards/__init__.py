"""Dashboards, recording rules and alerts, generated from the metric catalog.

Also the commands `zerowatch dashboards`, which generates them into `rendered/`, and `zerowatch
stack`, which starts Prometheus, Alertmanager, Grafana and Tempo with them.
"""
