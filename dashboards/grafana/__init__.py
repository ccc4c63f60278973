"""Defines dashboards as plain data, and converts them to JSON for Grafana 11 to 13.

`panels.py` and `dashboard.py` define the data, `panel_json.py` and `dashboard_json.py` convert it
with grafanalib. This is the only package that imports grafanalib.
"""
