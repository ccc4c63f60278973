"""One accumulation window: how a batch is cut, weighted and run; what the ranks agree on."""
