"""Ranks, groups, and what crosses them: the mesh, collectives, split layers and layout-free random numbers.

Only this package imports `torch.distributed`.
"""
