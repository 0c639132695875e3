"""Tensor parallelism: differentiable collectives, split layers, and the loss over a split vocabulary.

All functions and layers take their axis and are plain PyTorch on an axis of size 1. Sequence and expert parallelism are
in sibling packages.
"""
