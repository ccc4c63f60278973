"""What happened when memory ran out: the evidence, the report, and what would have fitted."""
