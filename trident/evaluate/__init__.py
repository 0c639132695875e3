"""Evaluation of trained networks: tasks, their queries, and the comparison of results.

Tasks are independent of how a network runs. A `Scorer` answers their queries: `LoadedScorer` for a loaded checkpoint,
`EngineScorer` for the network in training; both give the same result.
"""
