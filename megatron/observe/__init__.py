"""Reporting: turns one metrics record per step into console lines, JSON lines, TensorBoard, W&B and curves.

Only reports values: takes no training decisions and computes nothing on a device.
"""
