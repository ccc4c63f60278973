"""The monitoring stack on this machine, in containers or without them: `zerowatch stack`."""
