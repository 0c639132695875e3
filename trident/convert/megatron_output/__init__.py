"""Writes our checkpoints in formats of other programs: Megatron-LM's `torch` layout and DeepSpeed's universal format.

`output_tensors` is the only place that pickles, and it only writes.
"""
