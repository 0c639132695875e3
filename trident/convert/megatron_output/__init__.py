"""Writes checkpoints in the formats of other programs: Megatron-LM's `torch` layout and DeepSpeed's universal format.

Only `output_tensors` pickles, and it never unpickles.
"""
