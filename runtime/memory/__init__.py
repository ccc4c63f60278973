"""What memory is in use, at its peak, and how much there may be."""
