"""Deletion of old checkpoints, and copies in a second folder; works on committed checkpoints as a whole."""
