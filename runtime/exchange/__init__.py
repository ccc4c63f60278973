"""The ranks compared: who waits for whom, why, and whether all issue the same collectives."""
