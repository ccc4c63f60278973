"""Probes of device and host memory."""
