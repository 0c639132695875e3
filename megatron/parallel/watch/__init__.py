"""Watching the ranks of a run: where each of them is, and what happens when one stops, fails or ends.

Every rank has one thread and connections of its own for this, apart from those that training communicates over, so
that a rank whose collective never returns can still say where it is. Nothing here ends a process; `train/watchdog.py`
does.
"""
