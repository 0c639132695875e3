"""Hugging Face directories, both ways: one table per family says how its fields and tensors correspond to ours.

Tensors are streamed slice by slice; a conversion ends with a comparison of logits, or it leaves nothing behind.
"""
