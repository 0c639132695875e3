"""All ranks of a run in one process, before it starts: their programs, and whether these fit each other.

One rank of each class runs the code of a step on tensors without memory; the others of its class do the same with other
ranks. Nothing here trains.
"""
