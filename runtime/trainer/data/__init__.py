"""Loads a TrainingRun's data, and balances the load of ranks of unequal speed."""
