"""All ranks of a run simulated in one process before it starts, to check that their programs fit each other.

One rank of each class runs the code of a step on meta tensors; the other ranks of its class do the same with other
peers. Nothing here trains.
"""
