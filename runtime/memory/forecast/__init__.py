"""Prediction of peak memory, out-of-memory risk and leaks; pure functions of recorded series."""
