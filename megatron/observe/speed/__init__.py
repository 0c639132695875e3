"""How fast a run is, and how fast it could be: operations of a step, peaks of devices, waiting times, remaining time.

Figures and arithmetic only: what is measured is measured where it happens and handed in.
"""
