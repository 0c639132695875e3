"""Evaluation of trained networks: tasks, the queries they ask, and the comparison of their results.

Nothing here knows how a network is run. A `Scorer` answers queries, for a loaded checkpoint in `megatron.inference` and
for the network being trained in `megatron.train`, so a task gives the same result in both.
"""
