"""Reports of a run: metrics of each step to the console, JSON lines, TensorBoard and W&B.

Makes no decisions about training and computes nothing on a device.
"""
