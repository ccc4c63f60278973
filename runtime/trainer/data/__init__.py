"""The data of a TrainingRun: loaders that resume, and shares for ranks of unequal speed."""
