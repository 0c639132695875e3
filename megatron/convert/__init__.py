"""Checkpoints of other libraries, in and out: Hugging Face, DeepSpeed, Megatron-LM.

Converts between foreign files and the pieces that `checkpoint` reads and writes; starts no training and no model.
"""
