"""What is known about a run across its restarts: which run it is, how earlier starts ended, whether it may start again.

It depends on the files that hold this and on records of checkpoints, not on how a run is built or trained.
"""
