"""The training program: construction, the training loop, reporting, and stop conditions."""
