"""The vocabulary: what can be measured, how a value is written, how it leaves."""
