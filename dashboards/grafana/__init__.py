"""The data model of dashboards, and its conversion by grafanalib to JSON for Grafana 11 to 13."""
