"""The command `zerowatch estimate`: options, inputs and report."""
