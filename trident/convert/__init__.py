"""Converts models and checkpoints from and to the formats of other programs.

Each format has its own names, orders and files; tensors are exchanged by their global names and logical shapes.
"""
