"""How a batch is shared out so that ranks of unequal speed end together."""
