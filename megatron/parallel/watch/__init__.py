"""Monitoring of the ranks of a run: their positions, and the reaction to a rank that hangs, fails or exits.

Every rank has a thread and connections for this, separate from those of training, so that a rank in a collective that
never returns still reports. Nothing here ends a process; `train/watchdog.py` does.
"""
