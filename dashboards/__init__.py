"""What people look at and are woken by, generated from the catalog."""
