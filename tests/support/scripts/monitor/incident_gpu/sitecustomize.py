"""Scales the waits for a GPU's counters in each process of incident_job.py; Python imports it."""

import os

from zerowatch.runtime.devices import gpu_health

gpu_health.COUNTERS_SECONDS *= float(os.environ["INCIDENT_SCALE"])
