"""What goes over the wire: the tap, its operations and the process groups."""
