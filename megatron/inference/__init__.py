"""Text out of a checkpoint. Stands beside `train` and never imports it."""
