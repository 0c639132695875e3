"""Inspects, compares and averages checkpoints in one process, one slice at a time, and copies runs to other machines.

Nothing here is collective or used by training.
"""
