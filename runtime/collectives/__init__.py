"""Every collective of the process: seen, timed and added up."""
