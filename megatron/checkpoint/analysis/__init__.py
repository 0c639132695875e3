"""Examines, compares and averages checkpoints in one process, without a network; one slice is in memory at a time.

Knows manifests, pieces and records; nothing collective, and nothing that training uses.
"""
