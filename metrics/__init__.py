"""Metrics: the catalog, the recorder of values, the settings and the exporters."""
