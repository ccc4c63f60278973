"""One accumulation window: a batch is split, weighted, trained on, and becomes one update."""
