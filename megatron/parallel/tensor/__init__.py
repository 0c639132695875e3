"""Tensor parallelism: its communication operators, the layers built on them, and the loss over a split vocabulary.

Everything takes the axis it works on and is plain PyTorch on an axis of size 1. Sequence and expert parallelism have
packages of their own next to this one.
"""
