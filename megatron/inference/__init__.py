"""Generation: text out of a checkpoint. Imports nothing of `train`."""
