"""What is known of a run across its restarts: which run it is, how earlier starts ended, whether it may start again.

Knows the files that keep it and records of checkpoints; not how a run is built or trained.
"""
