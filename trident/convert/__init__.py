"""Models and checkpoints of other programs: read into ours and written from ours.

A format knows its own names, orders and files; everything crosses as our global names and logical shapes. Nothing here
trains.
"""
