"""What ZeRO's offloading moves between device, host and NVMe, and for how long."""
