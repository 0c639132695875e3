"""Evaluation of trained networks: tasks, the queries they ask, and the comparison of their results.

A task does not know how a network is run. A `Scorer` answers its queries, `LoadedScorer` for a loaded checkpoint and
`EngineScorer` for the network being trained, so it gives the same result in both.
"""
