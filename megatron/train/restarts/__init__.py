"""State of a run across restarts: its identity, the history of its starts, and the decision whether to start again.

Independent of how a run is built or trained.
"""
