"""Out-of-memory survived: a window abandoned, agreed anew, and run again."""
