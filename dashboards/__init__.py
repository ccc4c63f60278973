"""Dashboards, recording rules and alerts, generated from the metric catalog."""
