"""Text generation from a checkpoint; independent of `train`."""
