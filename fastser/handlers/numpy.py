"""numpy arrays."""
