"""What is particular to a kind of device: its utilization, power, peak FLOP/s and memory."""
