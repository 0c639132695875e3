"""Text generation from a checkpoint. Imports nothing of `train`."""
