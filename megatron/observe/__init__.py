"""What a run tells: one metrics record a step goes in; console, JSON lines, TensorBoard, W&B and curves come out.

Reads figures and writes them down; decides nothing about the training and computes nothing on a device.
"""
