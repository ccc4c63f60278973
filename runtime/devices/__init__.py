"""Probes of devices: utilisation, power, peak FLOP/s and memory."""
