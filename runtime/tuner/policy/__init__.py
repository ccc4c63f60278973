"""Decides for the tuner: diagnosis, proposals, trials and state machine, on plain data only."""
