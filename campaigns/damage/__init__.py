"""Checkpoints and values that are damaged, by chance or on purpose."""
