"""`.bin/.idx` to batches of token ids.

NumPy only. Knows no ranks except as two integers, and no process groups; the order of samples is a pure function of its
arguments.
"""
