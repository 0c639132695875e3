"""Pieces, records and checkpoints for tests that need some."""
