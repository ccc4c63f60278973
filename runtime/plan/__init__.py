"""What a DeepSpeed configuration will put on the wire, and hold in memory, before it runs."""
