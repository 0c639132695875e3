"""Ranks, groups, and what crosses them: the mesh, collectives, split layers and layout-free random numbers.

The only room that touches `torch.distributed`.
"""
