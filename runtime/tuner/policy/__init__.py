"""The tuner's decisions: diagnosis, proposals, trials and the state machine, on plain data only."""
