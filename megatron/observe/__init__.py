"""Reports of a run: one metrics record per step in; console, JSON lines, TensorBoard, W&B and curves out.

Reads figures and writes them down; it makes no decision about training and computes nothing on a device.
"""
