"""What a ds config will send and hold, before and while it runs."""
