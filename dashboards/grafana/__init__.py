"""Dashboards in our words, and their way by grafanalib to JSON that Grafana 11 to 13 reads."""
