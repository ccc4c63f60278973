"""From which value on a measurement is a problem. Advice, dashboards and alerts read it here.

Both are rules of thumb from practical guides to DeepSpeed's hybrid engine, which tune a job until
it meets them. They are where to start looking, not laws.
"""

COMM_RATIO_HIGH = 0.20  # communication in a step's time; above it, tune communication first
DEVICE_UTILIZATION_LOW = 0.70  # a device's busy share; below it, it waits for something else
