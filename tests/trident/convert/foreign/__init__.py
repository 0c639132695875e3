"""Checkpoints of other programs, written as they write them."""
