"""Imports and exports Hugging Face directories, with one table of fields and tensors per model family.

Tensors are streamed slice by slice. A conversion ends with a comparison of logits; if it fails, nothing is written.
"""
