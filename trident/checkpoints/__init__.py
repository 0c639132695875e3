"""Examines, compares and averages checkpoints in one process, one slice in memory at a time, and copies runs elsewhere.

Nothing here is collective, and nothing is used by training.
"""
