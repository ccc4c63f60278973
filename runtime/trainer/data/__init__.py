"""Data of a TrainingRun: resumable loaders, and load balancing for ranks of unequal speed."""
