"""Training with the compiled operations."""
