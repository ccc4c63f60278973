"""The command `zerowatch estimate`: communication and memory of a ds config, before it runs."""
