"""The view of a run on a terminal: `zerowatch top`."""
