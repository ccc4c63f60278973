"""Another engine in this process: same model, same ranks, same training, other ds config."""
