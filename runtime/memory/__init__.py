"""Memory by category, forecasts of peaks, leak detection and out-of-memory reports."""
