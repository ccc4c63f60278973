"""Readings of devices: utilization, power, peak FLOP/s, and the bytes of device and host memory.

This package reads a device, the kernel or the C library, and does not interpret the readings.
`runtime/memory/` computes what fills the memory and when it runs out.
`runtime/monitor/device_sampler.py` publishes the readings, and `runtime/common/accelerator.py`
wraps torch's functions of the device.
"""
