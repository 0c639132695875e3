"""Reports of a run: one metrics record per step in; console, JSON lines, TensorBoard and W&B out.

Reads figures and writes them down; it makes no decision about training and computes nothing on a device.
"""
